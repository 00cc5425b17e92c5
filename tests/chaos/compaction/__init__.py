"""Compacted topics under faults: a model of what may be read, the clients, and the replicas' files."""
