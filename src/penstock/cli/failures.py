"""The two errors that end a command. Their text is one line that tells the user what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Failure(Exception):
    """The operation failed. Exit code 1."""


class WrongUsage(Exception):
    """The arguments are invalid. Exit code 2."""


def near_name(name: str, names: Iterable[str]) -> str | None:
    """The closest match for a mistyped name, if one is close enough."""
    near = get_close_matches(name, list(names), n=1, cutoff=0.75)
    return near[0] if near else None
