"""Topic names: which are allowed, which collide, and which are internal.

A topic's name is also the name of its directories, so the allowed characters keep clients out of the rest of the
file system. ``a.b`` and ``a_b`` may not both exist: Kafka refuses the second one because its metrics would
confuse the two, and clients rely on the refusal.
"""

from __future__ import annotations

from penstock.model import TopicId

NAME_MAX = 249

_LEGAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")

CONSUMER_OFFSETS = "__consumer_offsets"
TRANSACTION_STATE = "__transaction_state"
SHARE_GROUP_STATE = "__share_group_state"
CLUSTER_METADATA = "__cluster_metadata"

_INTERNAL = frozenset((CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE, CLUSTER_METADATA))

# Kafka's id of the metadata topic; no other topic may have it.
CLUSTER_METADATA_ID = TopicId(bytes(15) + b"\x01")


def name_error(name: str) -> str | None:
    """Why this name is not allowed, as a message for the client; None when it is allowed."""
    if not name:
        return "A topic's name must not be empty."
    if name in (".", ".."):
        return f"A topic cannot be named '{name}'."
    if len(name) > NAME_MAX:
        return f"A topic's name has at most {NAME_MAX} characters, this one has {len(name)}."
    if not _LEGAL.issuperset(name):
        return "A topic's name may contain ASCII letters, digits, '.', '_' and '-' only."
    return None


def is_internal(name: str) -> bool:
    """Whether this is the name of an internal topic."""
    return name in _INTERNAL


def collision_key(name: str) -> str:
    """Two topics cannot exist whose names have the same key."""
    return name.replace(".", "_")
