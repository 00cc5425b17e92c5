"""Data directories: which log lies where, what is remembered of each, what fails and what expires."""
