"""Transactions on three real brokers, while brokers, coordinators and clients are killed, paused and supplanted.

Clients transfer money between accounts, each a partition; workers make one output of each record of a transfer, in
a transaction with the offsets that they have read. Each client is a process: some speak the classic generation
(librdkafka), some transactions v2 (Kafka's Java client). What is promised is in ``transactions/bank.py``.

Without PENSTOCK_CHAOS_SECONDS the faults go on for as long as a change is worth waiting for; PENSTOCK_CHAOS_FAULTS
asks for a number of them, as `make chaos-transactions` does.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from penstock.protocol.records import batches
from tests.chaos.brokers import ROLLING
from tests.chaos.clients import running
from tests.chaos.conftest import SECONDS
from tests.chaos.errands import create_topics
from tests.chaos.ledger import Ledger, Place
from tests.chaos.test_cluster_faults import assert_same_bytes, read_every_copy
from tests.chaos.transactions.bank import Chain, Outcomes, Transfers, places
from tests.chaos.transactions.faults import BrokerFaults, ClientFaults, Hand, wait_for_last_stable_offsets
from tests.chaos.transactions.processes import Clients, Slot, java_program, python_program
from tests.chaos.transactions.readers import Auditor, Follower, assert_agree, ends_of, read_everything
from tests.cluster import wire
from tests.cluster.cluster import Cluster, Node
from tests.cluster.wire import Wire
from tests.support import wait_until

pytestmark = pytest.mark.chaos

FAULTS = "PENSTOCK_CHAOS_FAULTS"
SECONDS_DEFAULT = 14.0
ACCOUNTS = places("accounts", 6)
OUTPUTS = places("outputs", 3)
GROUP = "workers"
# Of the clients: how long a transaction may be open.
TIMEOUT_S = 6.0
# Until the coordinator has looked, and all partitions have their markers.
SLACK_S = 60.0
DRAINED_S = 150.0
RATE = 20
SETTINGS = {
    **ROLLING,
    "transaction.state.log.num.partitions": "5",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "default.replication.factor": "3",
}


def wanted_seconds() -> float:
    return float(os.environ.get(SECONDS) or SECONDS_DEFAULT)


def wanted_faults() -> int:
    return int(os.environ.get(FAULTS) or 0)


@pytest.mark.timeout(2 * wanted_seconds() + 10 * wanted_faults() + 600)
def test_transactions_are_whole_and_exactly_once_whoever_dies(tmp_path: Path, seed: int) -> None:
    seconds, faults = wanted_seconds(), wanted_faults()
    is_long = bool(faults) or seconds > 4 * SECONDS_DEFAULT
    choose = random.Random(seed)
    ledger = Ledger()
    transfers_said, outputs_said = Outcomes(ledger), Outcomes(ledger)
    with Cluster(3, SETTINGS) as cluster:
        bootstrap = cluster.bootstrap
        create_topics(bootstrap, ACCOUNTS + OUTPUTS)
        for topic in ("accounts", "outputs"):
            cluster.wait_in_sync(topic)
        followed = Transfers("follower", ledger, transfers_said)
        chained = Chain("follower", ledger, outputs_said)
        readers = [
            Follower("follower of accounts", bootstrap, ledger, ACCOUNTS, followed),
            Follower("follower of outputs", bootstrap, ledger, OUTPUTS, chained),
        ]
        rest_s = 15.0 if is_long else 1.0
        auditor = Auditor(bootstrap, ledger, ACCOUNTS, transfers_said, choose.randrange(2**32), rest_s)
        slots = made_slots(bootstrap, ledger, transfers_said, outputs_said, tmp_path, choose, is_long)
        movers = [slot for slot in slots if slot.outcomes is transfers_said]
        with running([*readers, auditor], ledger), Clients(slots) as clients:
            wait_until(
                lambda: all(slot.began for slot in slots) or ledger.violations, 60, "all clients have begun"
            )
            ids = [slot.transactional_id for slot in slots]
            hands: list[Hand] = [
                BrokerFaults(
                    cluster, ["accounts", "outputs"], ids, GROUP, ledger, choose.randrange(2**32), 0.5
                ),
                ClientFaults(clients, TIMEOUT_S, ledger, choose.randrange(2**32), 0.3),
            ]
            strike(hands, ledger, seconds, faults, is_long)
            ledger.raise_violations()
            # All is well now: everybody goes on, and in the end the movers stop and the workers catch up.
            before = len(followed.found), len(chained.made)
            wait_until(
                lambda: (
                    ledger.violations
                    or (len(followed.found) > before[0] + 20 and len(chained.made) > before[1] + 20)
                ),
                DRAINED_S,
                "transfers and workers go on after the faults",
            )
            clients.stop_some(movers)
            settle(bootstrap, ACCOUNTS)
            transfers = final(bootstrap, ledger, transfers_said)
            wait_until(
                lambda: ledger.violations or len(chained.made) >= len(transfers.records),
                DRAINED_S,
                "every record has its output",
            )
            ledger.raise_violations()
        settle(bootstrap, OUTPUTS)
        transfers.check_complete()
        outputs = Chain("last reader", ledger, outputs_said)
        read_everything(bootstrap, OUTPUTS, outputs, "read_committed")
        outputs.check_complete(transfers)
        assert_agree(ledger, "accounts", followed, transfers)
        assert_agree(ledger, "outputs", chained, outputs)
        ledger.raise_violations()
        for topic in ("accounts", "outputs"):
            cluster.wait_in_sync(topic)
        read_every_copy(cluster, ACCOUNTS + OUTPUTS)
        assert_same_bytes(cluster, ACCOUNTS + OUTPUTS)
        assert_same_aborted(cluster, ACCOUNTS + OUTPUTS)
    show(hands, slots)
    print(
        f"seed {seed}: {sum(hand.count for hand in hands)} faults, {sum(slot.fences for slot in slots)} fenced,"
        f" {sum(slot.hung for slot in slots)} hung in librdkafka;"
        f" transfers: {len(transfers_said.committed)} committed, {len(transfers_said.aborted)} aborted,"
        f" {transfers_said.unknown} without an answer, {len(transfers.found)} found;"
        f" workers: {len(outputs_said.committed)} committed, {len(outputs_said.aborted)} aborted,"
        f" {outputs_said.unknown} without an answer, {len(outputs.made)} outputs;"
        f" {auditor.audits} audits of {auditor.records} records"
    )
    # Enough has happened.
    assert sum(hand.count for hand in hands) >= faults
    assert len(transfers_said.committed) >= 5 * seconds and len(transfers_said.aborted) >= seconds / 2
    assert len(outputs_said.committed) >= seconds / 2 and auditor.audits >= 2
    assert {slot.client for slot in slots} <= {each.client for each in transfers.found | outputs.found}
    assert any(slot.fences for slot in slots)


def made_slots(
    bootstrap: str,
    ledger: Ledger,
    transfers: Outcomes,
    outputs: Outcomes,
    scratch: Path,
    choose: random.Random,
    is_long: bool,
) -> list[Slot]:
    common = {"bootstrap": bootstrap, "topic": "accounts", "timeout_ms": str(int(TIMEOUT_S * 1000))}
    moving = {**common, "partitions": str(len(ACCOUNTS)), "rate": str(RATE)}
    working = {**common, "output": "outputs", "partitions": str(len(OUTPUTS)), "group": GROUP}
    java = java_program()
    kinds: list[tuple[list[str], dict[str, str], Outcomes]] = [
        (python_program("transfer"), moving, transfers),
        (python_program("transfer"), moving, transfers),
        (java, moving, transfers),
        (python_program("transform"), working, outputs),
        (python_program("transform"), working, outputs),
    ]
    if is_long:
        kinds += [(java, moving, transfers), (java, working, outputs)]
    return [
        Slot(client, command, arguments, said, ledger, scratch, random.Random(choose.randrange(2**32)))
        for client, (command, arguments, said) in enumerate(kinds)
    ]


def strike(hands: list[Hand], ledger: Ledger, seconds: float, faults: int, is_long: bool) -> None:
    """Let both hands work: for a while, until there were enough faults, and in a long run until each was there."""
    for hand in hands:
        hand.start()
    deadline = time.monotonic() + seconds
    while not ledger.violations and (
        time.monotonic() < deadline
        or sum(hand.count for hand in hands) < faults
        or (is_long and not all(hand.has_done_all for hand in hands))
    ):
        time.sleep(0.2)
    for hand in hands:
        hand.stop()


def settle(bootstrap: str, topic: list[Place]) -> None:
    ends: Callable[[str], dict[int, int]] = partial(ends_of, bootstrap, topic)
    wait_for_last_stable_offsets(ends, TIMEOUT_S + SLACK_S, topic[0].topic)


def final(bootstrap: str, ledger: Ledger, outcomes: Outcomes) -> Transfers:
    """The accounts as somebody finds them who reads them now."""
    transfers = Transfers("last reader", ledger, outcomes)
    read_everything(bootstrap, ACCOUNTS, transfers, "read_committed")
    return transfers


def assert_same_aborted(cluster: Cluster, places: list[Place]) -> None:
    """Every replica tells those who read from it the same aborted transactions, and ends at the same offset.

    A follower learns of the last stable offset with its next fetch.
    """
    for place in places:

        def answers(place: Place = place) -> list[tuple[int, list[tuple[int, int]]]]:
            return [aborted_on(node, place) for node in cluster.nodes.values()]

        def agree() -> bool:
            first, *others = answers()
            return all(each == first for each in others)

        wait_until(agree, 10.0, f"{place}: all replicas tell the same; now {answers()}")


def aborted_on(node: Node, place: Place) -> tuple[int, list[tuple[int, int]]]:
    """The last stable offset on a replica, and the aborted transactions below it."""
    aborted: set[tuple[int, int]] = set()
    offset, end = 0, 1
    while offset < end:
        with Wire(node.address) as connection:
            answer = wire.fetch(connection, *place, offset, rack="of no broker", is_committed=True)
        assert answer.error_code == 0, f"{place}: node {node.id} answers {answer.error_code}"
        listed = [(each.first_offset, each.producer_id) for each in answer.aborted_transactions or ()]
        assert listed == sorted(listed), f"{place}: node {node.id} lists {listed}"
        aborted |= set(listed)
        end = max(1, answer.last_stable_offset)
        before = offset
        for _, header in batches(bytes(answer.records or b"")):
            offset = header.base_offset + header.last_offset_delta + 1
        assert offset > before, f"{place}: node {node.id} has nothing at {offset}, before {end}"
    return end, sorted(aborted)


def show(hands: list[Hand], slots: list[Slot]) -> None:
    table = Table("fault", "times")
    for hand in hands:
        for fault, times in sorted(hand.struck.items()):
            table.add_row(fault, str(times))
    Console(width=100).print(table)
    print(f"instances of each client: {[slot.instance for slot in slots]}")
