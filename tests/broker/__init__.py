"""Tests of the broker's shell: a real process, spoken to in bytes."""
