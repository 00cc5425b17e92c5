"""Parse a position in a topic: `beginning`, `end`, an offset, the last N records, or a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from confluent_kafka.admin import AdminClient

from penstock.cli import client

HELP = "beginning, end, an offset, -N (the last N of each partition), a time (ISO 8601), or @MILLISECONDS"

# Kafka's timestamps are signed 64-bit numbers.
TIME_MS_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Position:
    kind: Literal["beginning", "end", "offset", "last", "time"]
    # The offset, the number of records, or milliseconds since 1970; 0 for "beginning" and "end".
    value: int = 0


def parse_position(text: str) -> Position:
    """Parse a position. Raises ValueError with the accepted forms."""
    word = text.strip().lower()
    if word in {"beginning", "earliest"}:
        return Position("beginning")
    if word in {"end", "latest"}:
        return Position("end")
    if word.removeprefix("-").isdecimal():
        return Position("last", int(word[1:])) if word.startswith("-") else Position("offset", int(word))
    if word.startswith("@") and word[1:].isdecimal() and int(word[1:]) <= TIME_MS_MAX:
        return Position("time", int(word[1:]))
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"not a position: {text!r}. Use beginning, end, an offset, -N, or a time such as 2026-11-16T09:00"
        ) from None
    # astimezone takes a time without a zone as local time.
    return Position("time", round(when.astimezone().timestamp() * 1000))


def resolve(
    admin: AdminClient,
    topic: str,
    partitions: Sequence[int],
    position: Position,
    *,
    read_committed: bool = False,
) -> dict[int, int]:
    """The offset of a position in each partition, clamped to the partition's log.

    With ``read_committed`` the log ends where its first open transaction begins.
    """
    starts = client.start_offsets(admin, topic, partitions)
    if position.kind == "beginning":
        return starts
    if position.kind == "time":
        return client.offsets_at_time(admin, topic, partitions, position.value, read_committed=read_committed)
    ends = client.end_offsets(admin, topic, partitions, read_committed=read_committed)
    if position.kind == "end":
        return ends
    if position.kind == "last":
        return {number: max(starts[number], ends[number] - position.value) for number in partitions}
    return {number: min(max(starts[number], position.value), ends[number]) for number in partitions}
