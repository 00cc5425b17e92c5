"""A place in a topic as people say it: `beginning`, `end`, an offset, the last N records, or a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from confluent_kafka.admin import AdminClient

from penstock.cli import client

HELP = "`beginning`, `end`, an offset, -N for the last N of each partition, a time (ISO 8601, or @ and ms)"

# Kafka's timestamps are signed and have 64 bits.
TIME_MS_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Position:
    kind: Literal["beginning", "end", "offset", "last", "time"]
    # The offset, how many records, or milliseconds since 1970; 0 where the kind says it all.
    value: int = 0


def parse_position(text: str) -> Position:
    """Read a position. Raises ValueError that lists what may be said."""
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
        raise ValueError(f"{text!r} is no place in a topic; say {HELP}") from None
    # A time without a zone is the person's own: astimezone reads it so.
    return Position("time", round(when.astimezone().timestamp() * 1000))


def resolve(admin: AdminClient, topic: str, partitions: Sequence[int], position: Position) -> dict[int, int]:
    """The offset of a position in each partition, never outside what the partition holds."""
    starts = client.start_offsets(admin, topic, partitions)
    if position.kind == "beginning":
        return starts
    if position.kind == "time":
        return client.offsets_at_time(admin, topic, partitions, position.value)
    ends = client.end_offsets(admin, topic, partitions)
    if position.kind == "end":
        return ends
    if position.kind == "last":
        return {number: max(starts[number], ends[number] - position.value) for number in partitions}
    return {number: min(max(starts[number], position.value), ends[number]) for number in partitions}
