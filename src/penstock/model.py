"""Ids and types that the whole system shares.

A topic id is its 16 raw bytes, because it is compared and looked up on every fetch. It is printed in Kafka's form
(url-safe base64 without padding).
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple, NewType

BrokerId = NewType("BrokerId", int)
Offset = NewType("Offset", int)
LeaderEpoch = NewType("LeaderEpoch", int)
TopicId = NewType("TopicId", bytes)

NO_TOPIC_ID = TopicId(bytes(16))


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        """Also the name of the partition's directory."""
        return f"{self.topic}-{self.partition}"


def format_id(raw: bytes) -> str:
    """Format a 16-byte id the way Kafka's tools print it."""
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def parse_id(text: str) -> bytes:
    """Parse the output of ``format_id``. Raises ValueError for anything else."""
    raw = urlsafe_b64decode(text + "==")
    if len(raw) != 16:
        raise ValueError(f"not a 16-byte id: {text!r}")
    return raw
