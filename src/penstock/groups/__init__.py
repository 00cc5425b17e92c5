"""Consumer groups and their committed offsets, as a sans-IO core."""
