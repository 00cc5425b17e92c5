"""Messages between the consumers of a group. The coordinator passes them on as opaque bytes.

A member joins with its subscription as ``metadata``, and the group's leader sends it an assignment; each is
preceded by its version as an int16. Brokers decode them only to display them and to find a member's topics.
"""

from __future__ import annotations

from penstock.protocol.schema import Message, array, binary, int32, string


class TopicPartition(Message):
    topic: str = string()
    partitions: list[int] = array(int32)


class ConsumerProtocolSubscription(Message, versions="0-3"):
    topics: list[str] = array(string)
    user_data: bytes | None = binary(nullable=True, default=None)
    owned_partitions: list[TopicPartition] = array(TopicPartition, "1+")
    generation_id: int = int32("2+", default=-1)
    rack_id: str | None = string("3+", nullable=True, default=None)


class StickyAssignorUserData(Message, versions="0-1"):
    """The ``user_data`` with which members of sticky groups say what they had, as in Java and librdkafka."""

    previous_assignment: list[TopicPartition] = array(TopicPartition)
    generation: int = int32("1+", default=-1)


class ConsumerProtocolAssignment(Message, versions="0-3"):
    assigned_partitions: list[TopicPartition] = array(TopicPartition)
    user_data: bytes | None = binary(nullable=True, default=None)
