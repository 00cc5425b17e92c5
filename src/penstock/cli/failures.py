"""The two ways a command gives up. Their text is one line for the person, and says what to do."""

from __future__ import annotations


class Failure(Exception):
    """The operation failed. Exit code 1."""


class WrongUsage(Exception):
    """The command was given what it cannot take. Exit code 2."""
