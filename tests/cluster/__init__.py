"""Clusters of real broker processes, and what their clients see while nodes come, go and fail."""
