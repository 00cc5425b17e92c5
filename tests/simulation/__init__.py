"""The simulator: first that it tells the truth, then what it finds out."""
