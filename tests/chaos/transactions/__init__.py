"""Money transfers and a consume-transform-produce chain on real processes; programs, checkers and faults."""
