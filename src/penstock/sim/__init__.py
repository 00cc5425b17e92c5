"""The simulator: whole clusters of the real broker code in one process, on virtual time, from a seed."""
