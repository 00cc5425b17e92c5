"""Parse node ids and partition numbers. Kafka has 31 bits for each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.cli.failures import Failure

NUMBER_MAX = 2**31 - 1
# Characters of the argument quoted in an error.
SHOWN_MAX = 40


def parse_number(text: str) -> int:
    """Raises ValueError."""
    word = text.strip()
    # int() of thousands of digits raises a ValueError with Python's own message.
    if not (word.isascii() and word.isdecimal()) or len(word) > 10 or int(word) > NUMBER_MAX:
        shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
        raise ValueError(f"{shown!r} is not a number from 0 to {NUMBER_MAX}")
    return int(word)


def parse_numbers(text: str) -> list[int]:
    """Parse a comma-separated list. Raises ValueError."""
    return [parse_number(word) for word in text.split(",")]


def refuse_missing(topic: str, wanted: Iterable[int], existing: Collection[int]) -> None:
    """Raise Failure for a partition that the topic does not have."""
    if missing := [number for number in wanted if number not in existing]:
        raise Failure(f"topic {topic} has no partition {missing[0]}; it has {len(existing)}")
