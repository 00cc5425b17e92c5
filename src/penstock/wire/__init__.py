"""A small Kafka client on our own codec, for Spark tasks: raw batches in and out, no record ever built.

``core.py`` is the client without sockets and clocks, ``blocking.py`` the sockets around it, ``client.py`` and
``producer.py`` what callers use. For applications there is librdkafka; this is for moving batches at the speed
of the disk.
"""

from __future__ import annotations

from penstock.model import TopicPartition
from penstock.wire.client import Client, shared
from penstock.wire.cluster import PartitionInfo, TopicInfo, parse_bootstrap
from penstock.wire.errors import (
    BadBootstrap,
    BatchTooLarge,
    BrokerRefused,
    GroupInUse,
    OffsetOutOfRange,
    OutOfSequence,
    TimedOut,
    TopicReplaced,
    UnknownTopic,
    Unreachable,
    UnsupportedBroker,
    WireError,
)
from penstock.wire.operations import EARLIEST, LATEST, MAX_TIMESTAMP, Fetched, OffsetAt
from penstock.wire.producer import Producer

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_TIMESTAMP",
    "BadBootstrap",
    "BatchTooLarge",
    "BrokerRefused",
    "Client",
    "Fetched",
    "GroupInUse",
    "OffsetAt",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionInfo",
    "Producer",
    "TimedOut",
    "TopicInfo",
    "TopicPartition",
    "TopicReplaced",
    "UnknownTopic",
    "Unreachable",
    "UnsupportedBroker",
    "WireError",
    "parse_bootstrap",
    "shared",
]
