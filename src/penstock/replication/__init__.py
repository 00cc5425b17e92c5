"""Who has which records: the cores of a partition's leader and of its followers."""
