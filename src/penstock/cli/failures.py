"""The two ways a command gives up. Their text is one line for the person, and says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Failure(Exception):
    """The operation failed. Exit code 1."""


class WrongUsage(Exception):
    """The command was given what it cannot take. Exit code 2."""


def near_name(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is near enough."""
    near = get_close_matches(name, list(names), n=1, cutoff=0.75)
    return near[0] if near else None
