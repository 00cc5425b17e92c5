"""What the tests ask of every client: one small vocabulary over nine different libraries.

Each ``test_<client>.py`` holds an adapter from this vocabulary to its library and lists, by the classes of
``contract`` it inherits, what that library can do. An adapter does nothing clever: no retries, no waiting for
things the library should wait for, or it would hide what the broker does wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]
Acks: TypeAlias = Literal["0", "1", "all"]
# How a client connects and proves who it is, under librdkafka's names. An adapter gives them its library's names.
Security: TypeAlias = Mapping[str, str]
Strategy: TypeAlias = Literal["range", "cooperative-sticky"]
# An int is a timestamp: the first record that is not older.
When: TypeAlias = int | Literal["earliest", "latest", "max_timestamp"]

# How long one step of a client (a call, a rebalance) may take before the test gives up on it.
PATIENCE_S = 30.0
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_INTERVAL_MS = 200


# Kafka's names, for the libraries that have names of their own. Not from our product, which is under test.
ERROR_NAMES = {
    1: "OFFSET_OUT_OF_RANGE",
    3: "UNKNOWN_TOPIC_OR_PARTITION",
    10: "MESSAGE_TOO_LARGE",
    17: "INVALID_TOPIC_EXCEPTION",
    29: "TOPIC_AUTHORIZATION_FAILED",
    36: "TOPIC_ALREADY_EXISTS",
    37: "INVALID_PARTITIONS",
    38: "INVALID_REPLICATION_FACTOR",
    40: "INVALID_CONFIG",
    58: "SASL_AUTHENTICATION_FAILED",
    68: "NON_EMPTY_GROUP",
    69: "GROUP_ID_NOT_FOUND",
}


class Outgoing(NamedTuple):
    """A record to be written. Without a partition the client's partitioner chooses by key."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | None = None


class Record(NamedTuple):
    """A record as a client read it."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Written(NamedTuple):
    """What the client says the broker answered for one record; the offset is -1 with acks=0."""

    partition: int
    offset: int


class ClientError(Exception):
    """The error that a client reported, under Kafka's own name for its code."""

    def __init__(self, name: str, message: str = "") -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message

    def __reduce__(self) -> tuple[type[ClientError], tuple[str, str]]:
        return ClientError, (self.name, self.message)


def error_name(error: Exception) -> str:
    """Of an error of a Python library: Kafka's name, or the library's for what it found out by itself."""
    code = getattr(error, "errno", None)
    return type(error).__name__ if code is None else ERROR_NAMES.get(code, str(code))


class BrokerView(NamedTuple):
    node_id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    cluster_id: str | None
    controller_id: int
    brokers: tuple[BrokerView, ...]


class PartitionView(NamedTuple):
    leader: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


class ConfigView(NamedTuple):
    value: str | None
    is_default: bool


@dataclass(frozen=True, slots=True)
class MemberView:
    client_id: str
    partitions: frozenset[int]
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class GroupView:
    state: str
    assignor: str
    members: tuple[MemberView, ...] = field(default=())


class Member(Protocol):
    """A consumer in a group. It polls by itself, in the background, and commits when it loses partitions."""

    def partitions(self) -> frozenset[int]:
        """What it owns now."""
        ...

    def revoked(self) -> int:
        """How many partitions were taken from it so far, one counted each time."""
        ...

    def records(self) -> list[Record]:
        """Everything it has received so far."""
        ...

    def leave(self) -> None: ...


class Client(Protocol):
    # Reading and writing

    def produce(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        codec: str = "none",
        acks: Acks = "all",
        idempotent: bool = False,
    ) -> list[Written]:
        """Write records with one producer and wait for the answers. Raises ClientError."""
        ...

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        """Read ``count`` records by assignment, each partition from the offset given."""
        ...

    def offset(self, topic: str, partition: int, when: When) -> int | None:
        """Ask ListOffsets; None when no record is that new."""
        ...

    # Groups

    def join(
        self, group: str, topic: str, *, strategy: Strategy = "range", instance_id: str | None = None
    ) -> Member: ...

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        """As the only member: read ``count`` records, commit exactly those, leave."""
        ...

    def groups(self) -> set[str]: ...

    def describe_group(self, group: str) -> GroupView: ...

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """The committed offsets; partitions without one are left out."""
        ...

    def alter_committed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None: ...

    def delete_committed(self, group: str, topic: str, partitions: Sequence[int]) -> None: ...

    def delete_group(self, group: str) -> None: ...

    # Topics, settings and the cluster

    def create_topic(
        self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None: ...

    def delete_topic(self, topic: str) -> None: ...

    def create_partitions(self, topic: str, count: int) -> None: ...

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None: ...

    def topics(self) -> set[str]: ...

    def describe_topic(self, topic: str) -> dict[int, PartitionView]:
        """Raises ClientError with UNKNOWN_TOPIC_OR_PARTITION when there is none."""
        ...

    def describe_configs(self, topic: str) -> dict[str, ConfigView]: ...

    def alter_config(self, topic: str, name: str, value: str | None) -> None:
        """Set one setting, leaving the others; None takes it back to its default."""
        ...

    def describe_cluster(self) -> ClusterView: ...

    def close(self) -> None: ...
