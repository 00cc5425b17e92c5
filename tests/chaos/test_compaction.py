"""Compacted topics on three real brokers whose processes are killed: everything that is read agrees with a dict.

After the idea of Kafka's LogCompactionTester: random keys, values and tombstones are written, and everything is
read before, while and after it is cleaned, while brokers and the processes that clean for them are killed. In the
end every replica is read by its files and as the leader, and Kafka's own dump tool reads the files too. What is
promised is in ``compaction/model.py``.

Segments are small and the cleaners eager, so a partition is cleaned many times a minute. Tombstones of one topic
stay, those of another may go at once, and the third topic is switched between compact and delete all the time.
Without PENSTOCK_CHAOS_SECONDS the faults go on for as long as a change is worth waiting for.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tests.chaos.brokers import ROLLING
from tests.chaos.clients import running
from tests.chaos.cluster_clients import patiently
from tests.chaos.compaction.clients import Auditor, KeyedWriter, random_entry, read_all
from tests.chaos.compaction.model import Entry, PartitionModel, differing
from tests.chaos.compaction.replicas import (
    cleaning_state,
    directory_of,
    is_cleaned,
    lead,
    left_overs,
    records_in_files,
    segments_of,
)
from tests.chaos.conftest import SECONDS
from tests.chaos.errands import settings
from tests.chaos.ledger import Ledger, Place, offset_in
from tests.cluster.cluster import Cluster, Node
from tests.dump_tool import assert_no_complaint, dump
from tests.support import job_process_of, wait_until

pytestmark = pytest.mark.chaos

SECONDS_DEFAULT = 6.0
PARTITIONS = 2
KEYS = 150
RATE = 250.0
CLEANED_S = 60.0
EAGER = {
    **ROLLING,
    "log.cleaner.backoff.ms": "50",
    "log.cleaner.min.cleanable.ratio": "0.01",
    "default.replication.factor": "3",
}
DAY_MS = 24 * 3600 * 1000
KEPT, DROPPED, SWITCHED = "kept", "dropped", "switched"
# How long tombstones stay, in milliseconds.
TOMBSTONES_MS = {KEPT: DAY_MS, DROPPED: 200, SWITCHED: DAY_MS}


def wanted_seconds() -> float:
    return float(os.environ.get(SECONDS) or SECONDS_DEFAULT)


@pytest.mark.timeout(3 * wanted_seconds() + 300)
def test_what_is_read_agrees_with_a_dict_whoever_is_killed(seed: int) -> None:
    seconds = wanted_seconds()
    choose = random.Random(seed)
    ledger = Ledger()
    models = [
        PartitionModel(Place(topic, partition), tombstones_may_go=topic == DROPPED)
        for topic in TOMBSTONES_MS
        for partition in range(PARTITIONS)
    ]
    with Cluster(3, EAGER) as cluster:
        create(cluster, TOMBSTONES_MS, PARTITIONS)
        writers = [
            KeyedWriter(
                number, cluster.bootstrap, ledger, model, keys=KEYS, seed=choose.randrange(2**32), rate=RATE
            )
            for number, model in enumerate(models)
        ]
        auditors = [
            Auditor(cluster.bootstrap, ledger, models, isolation=isolation, rest_s=0.2)
            for isolation in ("read_committed", "read_uncommitted")
        ]
        faults = Faults(cluster, [model.place for model in models], choose)
        with running([*writers, *auditors], ledger):
            wait_until(
                lambda: ledger.violations or all(model.acknowledged_end for model in models),
                60,
                "something is in every partition",
            )
            deadline = time.monotonic() + seconds
            while not ledger.violations and (time.monotonic() < deadline or not faults.is_enough()):
                faults.next()
        ledger.raise_violations()
        check_in_the_end(cluster, models, ledger)
    read = sum(auditor.readings for auditor in auditors)
    print(
        f"seed {seed}: {dict(faults.struck)}, {faults.switches} switches of the policy;"
        f" {sum(model.end_offset for model in models)} records written,"
        f" {sum(auditor.records for auditor in auditors)} read in {read} readings"
    )
    assert read >= 2


@pytest.mark.timeout(2 * wanted_seconds() + 300)
def test_aborted_records_are_cleaned_away_and_never_read(seed: int) -> None:
    choose = random.Random(seed)
    model = PartitionModel(Place("transacted", 0), tombstones_may_go=False)
    aborted: set[int] = set()
    with Cluster(3, EAGER | {"transaction.state.log.num.partitions": "3"}) as cluster:
        create(cluster, {model.place.topic: DAY_MS}, partitions=1)
        producer = Producer(settings(cluster.bootstrap, transactional_id="teller"))
        producer.init_transactions(60)
        kills = 0
        deadline = time.monotonic() + wanted_seconds() / 2
        while time.monotonic() < deadline or not kills:
            is_committed = choose.random() < 0.5
            written = in_transaction(producer, model.place, choose, is_committed=is_committed)
            if is_committed:
                for offset, entry in written.items():
                    model.wrote(offset, entry)
            else:
                aborted |= written.keys()
            node = cluster.nodes[choose.choice(sorted(cluster.nodes))]
            if choose.random() < 0.02:
                kills += kill_cleaner(node)
            if choose.random() < 0.05:
                model.check("a reader on the way", read_committed(cluster, model, producer, choose))
                model.raise_violations()
        cluster.stop(*cluster.nodes)
        cluster.start(*cluster.nodes)
        cluster.wait_in_sync(model.place.topic)
        wait_until_cleaned(cluster, [model.place])
        for node_id in cluster.nodes:
            lead(cluster, node_id, [model.place])
            model.check(f"node {node_id} as the leader", read_committed(cluster, model, producer, choose))
            model.raise_violations()
        wait_until_cleaned(cluster, [model.place])
        cluster.stop(*cluster.nodes)
        for node in cluster.nodes.values():
            records, _ = records_in_files(node, model.place)
            first_dirty_offset = cleaning_state(node, model.place).first_dirty_offset
            left = [offset for offset in sorted(records.keys() & aborted) if offset < first_dirty_offset]
            assert not left, f"node {node.id} still has aborted records at {left[:10]}"
            kept = {offset: entry for offset, entry in records.items() if offset not in aborted}
            model.check(f"the files of node {node.id}", kept)
            model.check_cleaned(f"the files of node {node.id}", kept, first_dirty_offset)
            model.raise_violations()
            assert sum(offset < first_dirty_offset for offset in aborted) > 100
        dumped(cluster.nodes[1], [model.place])


def in_transaction(
    producer: Producer, place: Place, choose: random.Random, *, is_committed: bool
) -> dict[int, Entry]:
    """A few records, and where they were written."""
    written: dict[int, Entry] = {}

    def delivered(entry: Entry, error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        written[offset_in(message)] = entry

    producer.begin_transaction()
    for _ in range(choose.randrange(1, 12)):
        entry = random_entry(choose, KEYS)
        producer.produce(
            place.topic,
            entry.value,
            entry.key,
            partition=place.partition,
            timestamp=entry.timestamp,
            headers=list(entry.headers),
            on_delivery=partial(delivered, entry),
        )
    # What is not sent when it is aborted would be given up.
    assert producer.flush(60) == 0
    if is_committed:
        producer.commit_transaction(60)
    else:
        producer.abort_transaction(60)
    return written


def read_committed(
    cluster: Cluster, model: PartitionModel, producer: Producer, choose: random.Random
) -> dict[int, Entry]:
    """Everything, up to a transaction that is made for it and that the model then knows of."""
    written = in_transaction(producer, model.place, choose, is_committed=True)
    for offset, entry in written.items():
        model.wrote(offset, entry)
    found: dict[int, Entry] = {}

    def saw(_: Place, offset: int, entry: Entry) -> None:
        found[offset] = entry

    ends = {model.place: max(written) + 1}
    assert read_all(cluster.bootstrap, ends, saw, isolation="read_committed")
    return found


def check_in_the_end(cluster: Cluster, models: Sequence[PartitionModel], ledger: Ledger) -> None:
    """Every copy, after everything was acknowledged, by its files and as the leader."""
    places = [model.place for model in models]
    switch(cluster, "compact")
    # A cleaner that was killed too often has set partitions aside until the next start.
    cluster.stop(*cluster.nodes)
    cluster.start(*cluster.nodes)
    for topic in TOMBSTONES_MS:
        cluster.wait_in_sync(topic)
    wait_until_cleaned(cluster, places)
    for node_id in cluster.nodes:
        lead(cluster, node_id, places)
        readings = read_everything(cluster, models)
        for model in models:
            model.check(f"node {node_id} as the leader", readings[model.place])
    for model in models:
        model.check_seen()
        model.raise_violations()
    wait_until_cleaned(cluster, places)
    cluster.stop(*cluster.nodes)
    for model in models:
        check_files(cluster, model)
    dumped(next(iter(cluster.nodes.values())), places)


def check_files(cluster: Cluster, model: PartitionModel) -> None:
    copies = []
    for node in cluster.nodes.values():
        records, end = records_in_files(node, model.place)
        who = f"the files of node {node.id}"
        assert end == model.end_offset, f"{who}: {model.place} ends at {end}, not {model.end_offset}"
        assert not left_overs(node, model.place), left_overs(node, model.place)
        state = cleaning_state(node, model.place)
        assert state.last_run is not None, f"{who}: {model.place} was never cleaned"
        assert 0 < state.first_dirty_offset <= int(segments_of(node, model.place)[-1].stem)
        model.check(who, records)
        model.check_cleaned(who, records, state.first_dirty_offset)
        copies.append(records)
    differences = differing(copies)
    assert not differences, f"{model.place}: copies differ at {differences[:10]}"
    model.raise_violations()


def dumped(node: Node, places: Sequence[Place]) -> None:
    """Kafka's tool reads the files of a node that is down and finds nothing wrong with them."""
    files = [path for place in places for path in sorted(directory_of(node, place).glob("*.log"))]
    output = dump(files, "--deep-iteration")
    assert output.count("baseOffset: ") >= len(files) / 2
    assert_no_complaint(output)
    indexes = [path for place in places for path in sorted(directory_of(node, place).glob("*index"))]
    assert_no_complaint(dump(indexes, "--index-sanity-check"))


def read_everything(cluster: Cluster, models: Sequence[PartitionModel]) -> dict[Place, dict[int, Entry]]:
    found: dict[Place, dict[int, Entry]] = {model.place: {} for model in models}

    def saw(place: Place, offset: int, entry: Entry) -> None:
        found[place][offset] = entry

    assert read_all(cluster.bootstrap, {model.place: model.end_offset for model in models}, saw)
    return found


def wait_until_cleaned(cluster: Cluster, places: Sequence[Place]) -> None:
    def dirty() -> list[tuple[int, Place]]:
        return [
            (node.id, place)
            for node in cluster.nodes.values()
            for place in places
            if not is_cleaned(node, place) or left_overs(node, place)
        ]

    wait_until(lambda: not dirty(), CLEANED_S, "every replica is cleaned up to its active segment")


def create(cluster: Cluster, tombstones_ms: Mapping[str, int], partitions: int) -> None:
    admin = AdminClient(settings(cluster.bootstrap))
    new = [
        NewTopic(
            topic,
            partitions,
            3,
            config={"cleanup.policy": "compact", "delete.retention.ms": str(retention_ms)},
        )
        for topic, retention_ms in tombstones_ms.items()
    ]
    for future in admin.create_topics(new).values():
        future.result(60)
    for topic in tombstones_ms:
        cluster.wait_in_sync(topic)


def switch(cluster: Cluster, policy: str) -> None:
    """Retention deletes nothing: the policy alone changes."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in {"cleanup.policy": policy, "retention.ms": "-1"}.items()
    ]
    admin = AdminClient(settings(cluster.bootstrap))

    def ask() -> None:
        resource = ConfigResource(ResourceType.TOPIC, SWITCHED, incremental_configs=entries)
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(30)

    patiently(ask)


class Faults:
    """Kills brokers and the processes that clean for them, preferably in the middle of it."""

    def __init__(self, cluster: Cluster, places: Sequence[Place], choose: random.Random) -> None:
        self._cluster = cluster
        self._places = places
        self._choose = choose
        self.struck: Counter[str] = Counter()
        self.switches = 0
        self._policy = "compact"
        self._deck: list[Callable[[], None]] = []

    def is_enough(self) -> bool:
        return min(self.struck[name] for name in ("cleaner", "broker", "all brokers")) > 0

    def next(self) -> None:
        if not self._deck:
            # The first ones are of every kind, so that a short run has seen all.
            cards = [self._kill_cleaner] * 5 + [self._kill_broker] * 2
            self._choose.shuffle(cards)
            self._deck = [*cards, self._kill_all, self._kill_broker, self._kill_cleaner]
        if self._choose.random() < 0.3:
            self._policy = "compact" if self._policy == "delete" else "delete"
            switch(self._cluster, self._policy)
            self.switches += 1
        self._deck.pop()()

    def _kill_cleaner(self) -> None:
        node = self._cluster.nodes[self._choose.choice(sorted(self._cluster.nodes))]
        if self._await_cleaning(node):
            self.struck["cleaner"] += kill_cleaner(node)

    def _kill_broker(self) -> None:
        node = self._cluster.nodes[self._choose.choice(sorted(self._cluster.nodes))]
        is_cleaning = self._await_cleaning(node)
        self._cluster.restart(node.id, kill=True)
        self.struck["broker"] += 1
        self.struck["broker while it cleaned"] += is_cleaning

    def _kill_all(self) -> None:
        self._await_cleaning(self._cluster.nodes[1])
        self._cluster.kill(*self._cluster.nodes)
        self._cluster.start(*self._cluster.nodes)
        self.struck["all brokers"] += 1

    def _await_cleaning(self, node: Node) -> bool:
        """Wait a while for files that a cleaner has begun, then for a moment more."""
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                if any(left_overs(node, place) for place in self._places):
                    time.sleep(self._choose.choice((0, 0, 0.001, 0.005, 0.02)))
                    return True
            time.sleep(0.0005)
        return False


def kill_cleaner(node: Node) -> bool:
    """Kill the process that cleans for a broker; whether there was one."""
    pid = job_process_of(node.pid)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
