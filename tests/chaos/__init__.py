"""Killing, starving and damaging real broker processes, and checking what they had promised."""
