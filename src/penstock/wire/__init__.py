"""A small Kafka client on our own codec, for Spark tasks: it moves raw batches and never builds single records.

``core.py`` is the client without sockets and clocks, ``blocking.py`` adds the sockets. ``client.py``,
``producer.py`` and ``transactional_producer.py`` are the public API. Applications should use librdkafka; this
client moves batches at disk speed.
"""

from __future__ import annotations

from penstock.model import TopicPartition
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
    ProducerFenced,
    TimedOut,
    TlsFailed,
    TopicReplaced,
    TransactionFailed,
    UnknownTopic,
    Unreachable,
    UnsupportedBroker,
    WireError,
)
from penstock.wire.operations import EARLIEST, LATEST, MAX_TIMESTAMP, Fetched, OffsetAt
from penstock.wire.producer import Producer
from penstock.wire.security import Security
from penstock.wire.transactional_producer import TransactionalProducer
from penstock.wire.transactions import GroupMember

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "AuthenticationFailed",
    "BadBootstrap",
    "BadSecurity",
    "BatchTooLarge",
    "BrokerRefused",
    "Client",
    "Fetched",
    "GroupInUse",
    "GroupMember",
    "OffsetAt",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionInfo",
    "Producer",
    "ProducerFenced",
    "Security",
    "TimedOut",
    "TlsFailed",
    "TopicInfo",
    "TopicPartition",
    "TopicReplaced",
    "TransactionFailed",
    "TransactionalProducer",
    "UnknownTopic",
    "Unreachable",
    "UnsupportedBroker",
    "WireError",
    "parse_bootstrap",
    "shared",
]
