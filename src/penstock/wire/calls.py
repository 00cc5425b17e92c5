"""The operations of a client as values. Each function here makes a ``Call``; the client of a shell does it:

    client.do(calls.topics(["orders"]))             # Client
    await client.do(calls.topics(["orders"]))       # AsyncClient

Every call is retried across leader changes, broker deaths and reconnects until its deadline. ``ask`` sends any
other request of the protocol to the broker that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.model import TopicPartition
from penstock.protocol.schema import VERSION_MAX, Message
from penstock.wire import admin, asking, groups, log_dirs, operations, transaction_admin
from penstock.wire.asking import To, codes_of
from penstock.wire.cluster import TopicInfo
from penstock.wire.core import Core, Steps, Task
from penstock.wire.operations import Fetched, OffsetAt
from penstock.wire.polling import FetchSettings, Polling
from penstock.wire.transaction_admin import (
    DescribedTransaction,
    ListedTransaction,
    ListFilter,
    PartitionProducer,
)
from penstock.wire.transactions import NO_MEMBER, GroupMember

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    # For error messages: "fetching orders-0".
    what: str
    steps: Callable[[Core, Task[Result]], Steps[Result]]


# Any request


def ask(
    to: To,
    message: Message,
    *,
    version_min: int = 0,
    version_max: int = VERSION_MAX,
    codes: Callable[[Any], Iterable[int]] = codes_of,
    is_repeatable: bool = True,
) -> Call[Any]:
    """The response to a request; one with a passing error, such as a moved coordinator, is asked for again.

    ``codes`` finds the error codes of a response, by default those of its first two levels. Final errors are the
    caller's to find in the response. If ``is_repeatable`` is false, the request is sent again only if it was surely
    not done; otherwise the call raises ``Unanswered``.
    """
    return Call(
        f"asking for {type(message).__name__.removesuffix('Request')}",
        lambda core, task: asking.ask(
            core, task, to, message, version_min, version_max, codes, is_repeatable=is_repeatable
        ),
    )


def ask_every(message: Message, *, version_min: int = 0) -> Call[dict[int, Any]]:
    """The response of every broker to a request, by broker id."""
    return Call(
        f"asking every broker for {type(message).__name__.removesuffix('Request')}",
        lambda core, task: asking.ask_every(core, task, message, version_min),
    )


# Reading


def topics(names: Iterable[str] | None = None, *, create: bool = False) -> Call[dict[str, TopicInfo]]:
    """Current metadata of these topics, or of all. Missing topics are left out.

    With ``create`` brokers with auto.create.topics.enable create missing topics, as for a producer.
    """
    wanted = None if names is None else list(dict.fromkeys(names))
    if wanted is not None and not wanted:
        return _known({})
    return Call("looking up topics", lambda core, task: operations.topics(core, task, wanted, create=create))


def topic(name: str) -> Call[TopicInfo]:
    """Current metadata of one topic, which brokers may have to hear of first. Raises UnknownTopic."""
    return Call(f"looking up topic {name}", lambda core, task: operations.topic(core, task, name))


def list_offsets(
    wanted: Mapping[TopicPartition, int], *, read_committed: bool = False
) -> Call[dict[TopicPartition, OffsetAt]]:
    """The offset of the first record at or after each timestamp, or of EARLIEST, LATEST, MAX_TIMESTAMP."""
    times = dict(wanted)
    return Call(
        "listing offsets", lambda core, task: operations.list_offsets(core, task, times, read_committed)
    )


def fetch(
    at: TopicPartition,
    offset: int,
    settings: FetchSettings,
    topic_id: bytes | None = None,
    polling: Polling | None = None,
) -> Call[Fetched]:
    """One response with records, or without any when ``wait_ms`` has passed. See ``operations.fetch``."""
    return Call(
        f"fetching {at} from {offset}",
        lambda core, task: operations.fetch(core, task, at, offset, settings, topic_id, polling),
    )


# Groups


def commit(
    group: str,
    offsets: Mapping[TopicPartition, int],
    *,
    metadata: str = "",
    member: GroupMember = NO_MEMBER,
) -> Call[None]:
    """Commit offsets, as a member of the group or to a group without members.

    Raises:
        GroupInUse: the group has members, and the caller is none.
        StaleMember: the group has gone on to another generation, or without this member.
    """
    if not offsets:
        return _known(None)
    return Call(
        f"committing to group {group}",
        lambda core, task: groups.commit(core, task, group, dict(offsets), metadata, member),
    )


def committed(group: str, wanted: Iterable[TopicPartition]) -> Call[dict[TopicPartition, int]]:
    """The committed offsets; partitions without one are left out."""
    partitions = list(dict.fromkeys(wanted))
    if not partitions:
        return _known({})
    return Call(
        f"reading the offsets of group {group}",
        lambda core, task: groups.committed(core, task, group, partitions),
    )


# Topics


def create_topic(
    name: str, partitions: int = -1, replication: int = -1, configs: Mapping[str, str] | None = None
) -> Call[bool]:
    """Create a topic and wait until it can be used; False if it exists already."""
    return Call(
        f"creating topic {name}",
        lambda core, task: admin.create_topic(core, task, name, partitions, replication, dict(configs or {})),
    )


def topic_configs(names: Iterable[str]) -> Call[dict[str, dict[str, str | None]]]:
    """All settings of each topic, defaults included. Raises UnknownTopic."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return _known({})
    return Call("reading the settings of topics", lambda core, task: admin.topic_configs(core, task, wanted))


def replicas(partitions: Iterable[TopicPartition] | None = None) -> Call[list[log_dirs.Replica]]:
    """The replicas of these partitions, or of all, with their sizes and how far they are compacted."""
    wanted: dict[str, list[int]] | None = None
    if partitions is not None:
        wanted = {}
        for at in dict.fromkeys(partitions):
            wanted.setdefault(at.topic, []).append(at.partition)
    return Call(
        "describing the replicas of brokers", lambda core, task: log_dirs.replicas(core, task, wanted)
    )


# Transactions, for operators


def list_transactions(wanted: ListFilter | None = None) -> Call[list[ListedTransaction]]:
    """The transactional ids that the cluster's coordinators know, in order."""
    return Call(
        "listing transactions",
        lambda core, task: transaction_admin.list_transactions(core, task, wanted or ListFilter()),
    )


def describe_transaction(transactional_id: str) -> Call[DescribedTransaction | None]:
    """The state of a transactional id; None if its coordinator does not know it."""
    return Call(
        f"describing the transaction of {transactional_id}",
        lambda core, task: transaction_admin.describe_transaction(core, task, transactional_id),
    )


def partition_producers(
    partitions: Iterable[TopicPartition],
) -> Call[dict[TopicPartition, list[PartitionProducer]]]:
    """The producers that the leaders of partitions remember, with their open transactions."""
    wanted = list(dict.fromkeys(partitions))
    return Call(
        "describing producers",
        lambda core, task: transaction_admin.partition_producers(core, task, wanted),
    )


def abort_in_partition(at: TopicPartition, producer: PartitionProducer) -> Call[None]:
    """End a hanging transaction in one partition with an abort marker. See ``transaction_admin``."""
    return Call(
        f"aborting the transaction of producer {producer.producer_id} in {at}",
        lambda core, task: transaction_admin.abort_in_partition(core, task, at, producer),
    )


def _known(result: Result) -> Call[Result]:
    def steps(core: Core, task: Task[Result]) -> Steps[Result]:
        return result
        yield  # what makes it a generator

    return Call("", steps)
