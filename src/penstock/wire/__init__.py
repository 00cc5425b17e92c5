"""A small Kafka client on our own codec, for Spark tasks, commands and the gateway.

``core.py`` is the client without sockets and clocks; ``blocking.py`` adds sockets, ``async_shell.py`` asyncio. The
public API: ``calls.py`` has the operations. ``client.py``, ``producer.py`` and ``transactional_producer.py`` are
blocking and move raw batches at disk speed; ``async_client.py`` is for many callers in one loop, and has single
records. Other applications should use librdkafka.
"""

from __future__ import annotations

from penstock.model import TopicPartition
from penstock.wire.async_client import AsyncClient
from penstock.wire.async_member import AsyncMember
from penstock.wire.async_producer import AsyncProducer, Message, Stored
from penstock.wire.client import Client, shared
from penstock.wire.cluster import PartitionInfo, TopicInfo, parse_bootstrap
from penstock.wire.errors import (
    AuthenticationFailed,
    BadBootstrap,
    BadSecurity,
    BatchTooLarge,
    BrokerRefused,
    GroupInUse,
    OffsetOutOfRange,
    OutOfSequence,
    ProduceFailed,
    ProducerFenced,
    StaleMember,
    TimedOut,
    TlsFailed,
    TopicReplaced,
    TransactionFailed,
    Unanswered,
    UnknownTopic,
    Unreachable,
    UnsupportedBroker,
    WireError,
)
from penstock.wire.membership import MembershipSettings
from penstock.wire.operations import EARLIEST, LATEST, MAX_TIMESTAMP, Fetched, OffsetAt
from penstock.wire.producer import Producer
from penstock.wire.security import Security
from penstock.wire.transactional_producer import TransactionalProducer
from penstock.wire.transactions import GroupMember

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "AsyncClient",
    "AsyncMember",
    "AsyncProducer",
    "AuthenticationFailed",
    "BadBootstrap",
    "BadSecurity",
    "BatchTooLarge",
    "BrokerRefused",
    "Client",
    "Fetched",
    "GroupInUse",
    "GroupMember",
    "MembershipSettings",
    "Message",
    "OffsetAt",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionInfo",
    "ProduceFailed",
    "Producer",
    "ProducerFenced",
    "Security",
    "StaleMember",
    "Stored",
    "TimedOut",
    "TlsFailed",
    "TopicInfo",
    "TopicPartition",
    "TopicReplaced",
    "TransactionFailed",
    "TransactionalProducer",
    "Unanswered",
    "UnknownTopic",
    "Unreachable",
    "UnsupportedBroker",
    "WireError",
    "parse_bootstrap",
    "shared",
]
