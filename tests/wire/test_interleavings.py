"""Whatever happens in whatever order: each batch is acknowledged once and is in the log once, in order; a reader
sees each batch of the log once, in order; and of a transaction everything counts or nothing."""

from __future__ import annotations

import random
from functools import partial
from operator import attrgetter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import batches, decode_header, decode_records
from penstock.wire import operations
from penstock.wire.polling import FetchSettings
from penstock.wire.transacting import State
from penstock.wire.transactions import NO_MEMBER
from tests.wire.fake import WALL_MS, FakeCluster, FakeShell, Writing
from tests.wire.fake_transactions import TransactionalCluster, Transactions

PLACES = [TopicPartition("orders", number) for number in range(3)]
REFUSALS = [
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
]
WRITTEN = REFUSALS[1:]
SEEDS = st.integers(0, 2**32 - 1)


def happenings(chance: random.Random) -> list[tuple[int, int]]:
    """Long, because trouble needs several batches in flight; lists that Hypothesis makes are mostly short."""
    return [(chance.randrange(100), chance.randrange(1000)) for _ in range(chance.randrange(20, 400))]


class Mischief:
    """Brokers that now and then refuse what they could take, or say that they refused what they took."""

    def __init__(self, cluster: FakeCluster, *, is_kafka: bool) -> None:
        # Apache Kafka refuses what stands behind a refused batch as out of order, and takes any first sequence
        # of a producer that it does not know.
        self._is_kafka = is_kafka
        for _, partitions in cluster.topics.values():
            for partition in partitions.values():
                partition.producers.log_was_empty = not is_kafka
        self._write = cluster.write
        cluster.write = self  # type: ignore[method-assign]
        self.next: ErrorCode | None = None
        self.says_duplicate = False

    def __call__(self, partition: Any, batch: bytearray) -> tuple[int, int]:
        code, self.next = self.next, None
        header = decode_header(batch)
        if code is not None and code not in WRITTEN:
            if not self._is_kafka:
                partition.refused_batches.add(header, code, WALL_MS)
            return code, -1
        before = partition.log_end_offset
        result = self._write(partition, batch)
        if code is not None:
            return code, -1
        if result[0] == ErrorCode.NONE and partition.log_end_offset == before and self.says_duplicate:
            return ErrorCode.DUPLICATE_SEQUENCE_NUMBER, -1
        return result


def disturb(shell: FakeShell, cluster: FakeCluster, mischief: Mischief | None, kind: int, which: int) -> None:
    """Let one thing happen: mostly that which ought to."""
    acting, delivering = shell.can_act(), shell.can_deliver()
    if kind < 40 and acting:
        shell.act(acting[which % len(acting)])
    elif kind < 75 and delivering:
        shell.deliver(delivering[which % len(delivering)])
    elif kind < 82 and shell.links:
        shell.lose(sorted(shell.links)[which % len(shell.links)])
    elif kind < 87:
        cluster.move(PLACES[which % len(PLACES)], 1 + which % 3)
    elif kind < 92 and mischief is not None:
        mischief.next = REFUSALS[which % len(REFUSALS)]
    elif kind < 95:
        broker = 1 + which % 3
        if broker in shell.refusing:
            shell.refusing.discard(broker)
        elif len(shell.refusing) < 2:
            shell.refusing.add(broker)
    else:
        shell.wait(which)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_every_batch_is_written_once_in_order(seed: int) -> None:
    chance = random.Random(seed)
    cluster = FakeCluster(version_max={0: chance.choice([13, 9])})
    cluster.make_topic("orders", [1, 2, 1])
    cluster.has_hints = chance.random() < 0.5
    mischief = Mischief(cluster, is_kafka=chance.random() < 0.5)
    mischief.says_duplicate = chance.random() < 0.5
    writing = Writing(cluster)
    where: dict[int, TopicPartition] = {}
    for kind, which in happenings(chance):
        if which % 3 == 0:
            at = PLACES[(which // 3) % 3]
            where[writing.send(at, records=1 + which % 4)] = at
        disturb(writing.shell, cluster, mischief, kind, which)
    # All is well again from here on.
    mischief.next = None
    writing.shell.refusing.clear()
    writing.flush()

    assert sorted(number for number, _ in writing.acked) == list(range(writing.made))
    for at in PLACES:
        expected = [number for number in range(writing.made) if where[number] == at]
        stored = cluster.partition(at).batches
        records = [decode_records(data, bytes_max=1 << 20) for _, data in stored]
        assert [int(batch[0].key or b"") for batch in records] == expected
        sequences = [decode_header(data).base_sequence for _, data in stored]
        assert sequences == [base for base, _ in stored], "without a hole: this producer writes alone"
    for number, offset in writing.acked:
        base = [base for base, data in cluster.partition(where[number]).batches if _number(data) == number]
        assert [offset] == base or offset == -1


def _number(data: bytes) -> int:
    return int(decode_records(data, bytes_max=1 << 20)[0].key or b"")


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_a_reader_sees_every_batch_once_in_order(seed: int) -> None:
    chance = random.Random(seed)
    cluster = FakeCluster(version_max={1: chance.choice([18, 12])})
    cluster.make_topic("orders", [1, 2, 3])
    at = PLACES[0]
    cluster.fill(at, batches=30)
    shell = FakeShell(cluster, bootstrap="broker-2:9092,broker-3:9092")
    shell.piece_bytes = chance.randrange(1, 400)
    bytes_max = chance.randrange(100, 2_000)
    seen: list[int] = []
    steps = iter(happenings(chance))
    offset = 0
    while offset < cluster.partition(at).log_end_offset:
        task = shell.start(
            "fetching",
            lambda core, task, offset=offset: operations.fetch(
                core, task, at, offset, FetchSettings(bytes_max=bytes_max)
            ),
        )
        while not task.is_done:
            step = next(steps, None)
            if step is None:
                shell.refusing.clear()
                shell.run(partial(attrgetter("is_done"), task))
            else:
                disturb(shell, cluster, None, *step)
        fetched = task.outcome()
        seen += [header.base_offset for _, header in batches(fetched.records)]
        assert fetched.next_offset > offset
        offset = fetched.next_offset
    assert seen == list(range(0, 90, 3))


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.sampled_from([1, 2]))
def test_of_a_transaction_everything_counts_or_nothing(seed: int, level: int) -> None:
    chance = random.Random(seed)
    cluster = TransactionalCluster(level)
    transactions = Transactions(cluster)
    shell, transacting = transactions.shell, transactions.transacting
    # The producer checks the sequences of an epoch only once it has begun, as Apache Kafka does.
    mischief = Mischief(cluster, is_kafka=True)
    steps = iter(happenings(chance))

    def disturb_until(done: Any) -> None:
        for kind, which in steps:
            if done():
                return
            if kind % 25 == 24:
                cluster.coordinator = 1 + which % 3
            disturb(shell, cluster, mischief, kind, which)
            transacting.check()
        mischief.next = None
        shell.refusing.clear()
        shell.run(done)

    def do(operation: Any) -> None:
        task = shell.start("doing", operation)
        disturb_until(lambda: task.is_done)
        task.outcome()
        transacting.check()

    do(transacting.init)
    expected: dict[TopicPartition, list[bytes]] = {at: [] for at in PLACES}
    committed = -1
    producing = transacting.producing
    for number in range(12):
        transactions.begin()
        sent = [(chance.choice(PLACES), b"%d-%d" % (number, place)) for place in range(chance.randrange(6))]
        for at, value in sent:
            transactions.send(at, value)
        if chance.random() < 0.4:
            disturb_until(lambda: producing.has_requests or not producing.unacknowledged)
            transacting.give_up()
            disturb_until(lambda: not producing.has_requests)
            do(transacting.abort)
        else:
            offsets = {PLACES[0]: number}
            do(
                lambda core, task, offsets=offsets: transacting.send_offsets(
                    core, task, "g", offsets, NO_MEMBER
                )
            )
            disturb_until(lambda: not producing.unacknowledged)
            do(transacting.commit)
            committed = number
            for at, value in sent:
                expected[at].append(value)
        assert transacting.state is State.READY
    assert {at: cluster.read(at) for at in PLACES} == expected
    assert cluster.offsets.get(("g", PLACES[0]), -1) == committed
