"""Every metric of a node, with its meaning: from the plain numbers of its parts to Prometheus's families.

The names begin with ``penstock_`` and end with their unit. Where Kafka has the same number it means the same here,
and docs/guide/monitoring.md names it. What grows with the number of topics or APIs is given in pieces, each a
family of the same name, so that a scrape can be made in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

import penstock
from penstock.broker.broker import Broker
from penstock.broker.counters import BOUNDS_US, Durations, TopicTraffic
from penstock.broker.metrics.census import Census, HostedCount
from penstock.broker.metrics.loop_lag import LoopLag
from penstock.broker.metrics.process_figures import ProcessFigures
from penstock.broker.network.audit import api_name
from penstock.broker.network.response_errors import error_name
from penstock.broker.network.server import Server

# Topics with time series of their own. A broker with more gives those of the first by name.
TOPICS_MAX = 10_000
TOPICS_PER_PIECE = 50

_BOUNDS = [str(bound_us / 1_000_000) for bound_us in BOUNDS_US] + ["+Inf"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers come from."""

    broker: Broker
    # By what they serve: clients, or nodes.
    servers: Mapping[str, Server]
    loop_lag: LoopLag
    # None in a simulated node.
    process: ProcessFigures | None


def families(sources: Sources, census: Census, is_ready: bool) -> Iterator[Metric]:
    """All metrics. Meant to be iterated in slices: what it reads is read when it is asked for the next one."""
    broker = sources.broker
    yield from _node(broker, is_ready)
    yield from _loop(sources)
    yield from _network(sources)
    yield from _quorum(broker)
    yield from _cluster(broker, census)
    yield from _disks(broker, census)
    if broker.is_broker:
        yield from _partitions(broker, census.hosted)
        yield from _cleaner(broker)
        yield from _transactions(census.hosted)
        yield from _topics(broker, census.hosted)
    yield from _requests(sources)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_, value=value)


def _counter(name: str, help_: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_, value=value)


def _labelled(
    kind: Callable[..., Metric], name: str, help_: str, label: str, values: Iterable[tuple[str, float]]
) -> Metric:
    family = kind(name, help_, labels=[label])
    for text, value in values:
        family.add_metric([text], value)  # type: ignore[attr-defined]
    return family


def _histogram(
    name: str, help_: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], Durations]]
) -> Metric:
    family = HistogramMetricFamily(name, help_, labels=labels)
    for texts, durations in values:
        total = 0
        buckets = []
        for bound, count in zip(_BOUNDS, durations.counts):
            total += count
            buckets.append((bound, total))
        family.add_metric(texts, buckets, durations.sum_us / 1_000_000)
    return family


def _node(broker: Broker, is_ready: bool) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "penstock_build_info", "Always 1; the labels say what runs.", labels=["version", "node_id"]
    )
    info.add_metric([penstock.__version__, str(broker.node_id)], 1)
    yield info
    yield _gauge("penstock_ready", "Whether /readyz says that this node is ready.", is_ready)
    ahead_ms = broker.clocks.ahead_ms().get(broker.node_id)
    yield _labelled(
        GaugeMetricFamily,
        "penstock_clock_ahead_seconds",
        "How far the clock of this broker is ahead of the median of all. None while they are not compared.",
        "node_id",
        [] if ahead_ms is None else [(str(broker.node_id), ahead_ms / 1000)],
    )
    yield _gauge(
        "penstock_clock_doubted",
        "Whether the time is in doubt, so that records are not deleted by age as usual.",
        broker.clocks.doubt() is not None,
    )


def _loop(sources: Sources) -> Iterator[Metric]:
    yield _histogram(
        "penstock_loop_lag_seconds",
        "How late the event loop runs what is due, looked at five times a second.",
        (),
        [((), sources.loop_lag.durations)],
    )
    if sources.process is not None:
        yield _histogram(
            "penstock_gc_pause_seconds",
            "Pauses by Python's garbage collector.",
            ["generation"],
            [([str(number)], each) for number, each in enumerate(sources.process.pauses)],
        )
        yield from sources.process.collect()
    storage, consensus = sources.broker.storage, sources.broker.consensus
    yield _histogram(
        "penstock_fsync_seconds",
        "Flushes of a log to the disk, with the wait for a thread. The log is of records (data) or metadata.",
        ["log"],
        [
            (["data"], storage.flush_queue.durations),
            (["metadata"], consensus.flush_durations),
        ],
    )


def _network(sources: Sources) -> Iterator[Metric]:
    servers = sources.servers.values()
    yield _labelled(
        GaugeMetricFamily,
        "penstock_connections",
        "Open connections.",
        "listener",
        [pair for server in servers for pair in server.connection_counts().items()],
    )
    yield _labelled(
        CounterMetricFamily,
        "penstock_connections_accepted",
        "Connections that were accepted, also those that were closed because of a limit.",
        "listener",
        [pair for server in servers for pair in server.accepted.items()],
    )
    yield _labelled(
        CounterMetricFamily,
        "penstock_connections_refused",
        "Connections that were closed at once because of a limit.",
        "server",
        [(name, server.connections_refused) for name, server in sources.servers.items()],
    )
    broker = sources.broker
    waiting = broker.waiting_requests
    yield _labelled(
        GaugeMetricFamily,
        "penstock_waiting_requests",
        "Fetches that wait for data, and produces that wait for replicas or a flush.",
        "api",
        [("Fetch", waiting.fetches), ("Produce", waiting.produces)],
    )
    yield _gauge(
        "penstock_throttled_connections",
        "Connections that are delayed now, because their client is over a quota.",
        broker.throttling.delayed,
    )
    yield _counter(
        "penstock_throttles", "Delays of a connection because of a quota.", broker.throttling.count
    )


def _quorum(broker: Broker) -> Iterator[Metric]:
    consensus = broker.consensus
    yield _gauge(
        "penstock_active_controller",
        "1 on the node that is the active controller. The sum over the cluster must be 1.",
        consensus.is_active,
    )
    leader = consensus.leader_id
    yield _gauge(
        "penstock_quorum_leader_id",
        "The node that leads the metadata quorum, as far as this one knows; -1 for none.",
        -1 if leader is None else leader,
    )
    yield _gauge("penstock_quorum_epoch", "The epoch of the metadata quorum.", consensus.epoch)
    yield _gauge(
        "penstock_metadata_offset",
        "The end of the metadata that this node has applied.",
        broker.image.offset + 1,
    )
    yield _gauge(
        "penstock_metadata_lag_records",
        "Committed metadata, as far as this node knows, that it has not applied yet.",
        max(0, consensus.high_watermark - (broker.image.offset + 1)),
    )
    end_offset = consensus.log_end_offset
    yield _labelled(
        GaugeMetricFamily,
        "penstock_quorum_lag_records",
        "How far each voter and observer is behind the leader of the metadata quorum; only on the leader.",
        "node_id",
        [
            (str(node), max(0, end_offset - max(0, offset)))
            for node, offset in consensus.progress().items()
            if node != broker.node_id
        ],
    )


def _cluster(broker: Broker, census: Census) -> Iterator[Metric]:
    """What only the active controller says, so that a sum over the cluster is true."""
    if census.cluster is None:
        return
    count, image = census.cluster, broker.image
    fenced = sum(each.fenced for each in image.brokers.values())
    yield _gauge("penstock_cluster_topics", "Topics of the cluster.", len(image.topics))
    yield _gauge("penstock_cluster_partitions", "Partitions of the cluster.", count.partitions)
    yield _gauge(
        "penstock_offline_partitions",
        "Partitions without a leader, which can be neither written nor read.",
        count.offline,
    )
    yield _gauge(
        "penstock_not_preferred_leaders",
        "Partitions that are not led by the first of their replicas.",
        count.not_preferred,
    )
    yield _labelled(
        GaugeMetricFamily,
        "penstock_cluster_brokers",
        "Registered brokers, by state.",
        "state",
        [("active", len(image.brokers) - fenced), ("fenced", fenced)],
    )


def _disks(broker: Broker, census: Census) -> Iterator[Metric]:
    disks = census.disks
    for name, help_, values in (
        (
            "penstock_disk_size_bytes",
            "The file system of a data directory.",
            [(each.path, each.size_bytes) for each in disks],
        ),
        (
            "penstock_disk_free_bytes",
            "Free space on the file system of a data directory.",
            [(each.path, each.free_bytes) for each in disks],
        ),
        (
            "penstock_disk_online",
            "0 for a data directory that has failed.",
            [(each.path, each.is_online) for each in disks],
        ),
        (
            "penstock_disk_full",
            "1 for a data directory without room for records.",
            [(each.path, each.is_full) for each in disks],
        ),
    ):
        known = [(path, value) for path, value in values if value is not None]
        yield _labelled(GaugeMetricFamily, name, help_, "directory", known)


def _partitions(broker: Broker, count: HostedCount) -> Iterator[Metric]:
    for name, help_, value in (
        ("penstock_replicas", "Replicas on this broker.", count.replicas),
        ("penstock_leaders", "Partitions that this broker leads.", count.leaders),
        (
            "penstock_offline_replicas",
            "Replicas on this broker that cannot be used: their disk has failed, or they are damaged.",
            count.offline_replicas,
        ),
        (
            "penstock_under_replicated_partitions",
            "Partitions led here with replicas that are not in sync.",
            count.under_replicated,
        ),
        (
            "penstock_under_min_isr_partitions",
            "Partitions led here with fewer replicas in sync than min.insync.replicas: they cannot be written to.",
            count.under_min_isr,
        ),
        (
            "penstock_at_min_isr_partitions",
            "Partitions led here with exactly min.insync.replicas in sync: one more lost, and writing stops.",
            count.at_min_isr,
        ),
        ("penstock_reassigning_partitions", "Partitions led here that are moved.", count.reassigning),
    ):
        yield _gauge(name, help_, value)
    proposals = broker.replication.proposals
    yield _counter("penstock_isr_shrinks", "Replicas lost from an ISR by this leader.", proposals.shrinks)
    yield _counter("penstock_isr_expansions", "Replicas that came back into an ISR.", proposals.expansions)


def _cleaner(broker: Broker) -> Iterator[Metric]:
    totals = broker.cleaner.totals
    for name, help_, value in (
        ("penstock_cleaner_runs", "Compactions of a log that were completed.", totals.runs),
        ("penstock_cleaner_failures", "Compactions of a log that failed.", totals.failures),
        ("penstock_cleaner_seconds", "Time that compactions took.", totals.duration_ms / 1000),
        ("penstock_cleaner_read_bytes", "Bytes of segments that were compacted.", totals.bytes_read),
        ("penstock_cleaner_written_bytes", "Bytes that were left of them.", totals.bytes_written),
        ("penstock_cleaner_read_records", "Records in segments that were compacted.", totals.records_read),
        ("penstock_cleaner_written_records", "Records that were left of them.", totals.records_written),
    ):
        yield _counter(name, help_, value)
    yield _gauge(
        "penstock_cleaner_set_aside_partitions",
        "Logs that are not compacted for an hour, because it failed three times in a row.",
        broker.cleaner.set_aside,
    )


def _transactions(count: HostedCount) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily,
        "penstock_open_transactions",
        "Transactions that this broker coordinates and that have not ended, by state.",
        "state",
        count.transactions.items(),
    )


# Name, kind, meaning and value by topic.
_TOPIC_FAMILIES: tuple[tuple[str, str, Callable[[TopicTraffic], int]], ...] = (
    (
        "penstock_topic_in_bytes",
        "Bytes of batches that producers have written to this broker.",
        lambda traffic: traffic.bytes_in,
    ),
    (
        "penstock_topic_in_messages",
        "Records that producers have written to this broker.",
        lambda traffic: traffic.messages_in,
    ),
    (
        "penstock_topic_out_bytes",
        "Bytes of batches that this broker has sent to consumers.",
        lambda traffic: traffic.bytes_out,
    ),
    (
        "penstock_topic_out_messages",
        "Offsets that this broker has sent to consumers, also of records that were compacted away.",
        lambda traffic: traffic.messages_out,
    ),
    (
        "penstock_topic_replication_in_bytes",
        "Bytes of batches that this broker has copied from leaders.",
        lambda traffic: traffic.replication_bytes_in,
    ),
    (
        "penstock_topic_replication_out_bytes",
        "Bytes of batches that this broker has sent to followers.",
        lambda traffic: traffic.replication_bytes_out,
    ),
)


def _topics(broker: Broker, count: HostedCount) -> Iterator[Metric]:
    everything = sorted(count.size_bytes)
    topics = everything[:TOPICS_MAX]
    yield _gauge(
        "penstock_topics_left_out",
        "Topics without time series of their own, because there are too many.",
        len(everything) - len(topics),
    )
    yield from _by_topic(
        GaugeMetricFamily,
        "penstock_log_size_bytes",
        "Bytes of the logs of a topic on this broker, without indexes.",
        topics,
        lambda topic: count.size_bytes[topic],
    )
    # Now: meanwhile a topic may be deleted.
    traffic = {
        topic: found for topic in topics if (found := broker.partitions.traffic.get(topic)) is not None
    }
    for name, help_, value in _TOPIC_FAMILIES:
        yield from _by_topic(
            CounterMetricFamily, name, help_, list(traffic), partial(_value_of, traffic, value)
        )


def _value_of(traffic: Mapping[str, TopicTraffic], value: Callable[[TopicTraffic], int], topic: str) -> int:
    return value(traffic[topic])


def _by_topic(
    kind: Callable[..., Metric], name: str, help_: str, topics: list[str], value: Callable[[str], int]
) -> Iterator[Metric]:
    rest = iter(topics)
    piece = list(islice(rest, TOPICS_PER_PIECE))
    # Also without any topic: a metric that is missing looks like an old release.
    yield _labelled(kind, name, help_, "topic", [(topic, value(topic)) for topic in piece])
    while piece := list(islice(rest, TOPICS_PER_PIECE)):
        yield _labelled(kind, name, help_, "topic", [(topic, value(topic)) for topic in piece])


def _requests(sources: Sources) -> Iterator[Metric]:
    name, labels = "penstock_request_seconds", ["server", "api"]
    help_ = (
        "Time from the turn in which a request came in until its answer was ready. "
        "A Fetch waits for data, and a Produce for replicas."
    )
    yield _histogram(name, help_, labels, [])
    for server_name, server in sources.servers.items():
        for key, counts in list(server.requests.by_api.items()):
            yield _histogram(name, help_, labels, [([server_name, api_name(key)], counts.durations)])
    errors = CounterMetricFamily(
        "penstock_request_errors",
        "Errors in answers. An answer may have one for each of its partitions.",
        labels=["server", "api", "error"],
    )
    for server_name, server in sources.servers.items():
        for key, counts in list(server.requests.by_api.items()):
            for error, count in counts.errors.items():
                errors.add_metric([server_name, api_name(key), error_name(error)], count)
    yield errors
