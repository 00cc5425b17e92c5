"""A cluster of an earlier commit is upgraded by a rolling restart under load; `make upgrade FROM=COMMIT`.

The old code writes the logs, the metadata, the offsets. Then each node in turn is restarted on this checkout, by
SIGTERM in the first round and by SIGKILL in the second. In between versions are mixed: either one leads, follows
and decides, and clients must not notice more than a delay. The promises are those of ``test_cluster_faults.py``.

Not among the tests that are collected by themselves: it needs the history of the checkout.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.clients import Client, running
from tests.chaos.cluster_clients import ClusterCommitter, ClusterWriter, Commits, GroupMember
from tests.chaos.errands import create_topics, read_everything
from tests.chaos.ledger import Ledger, Place
from tests.cluster.cluster import Cluster
from tests.support import wait_until
from tests.tools import ROOT

FROM = "PENSTOCK_UPGRADE_FROM"
LOADED = [Place("loaded", partition) for partition in range(6)]
MARKED = [Place("marked", partition) for partition in range(8)]
RECORDS_PER_SECOND = 150
# What is written between two steps, at the least.
RECORDS_BETWEEN = 400
PATIENCE_S = 180.0

pytestmark = pytest.mark.chaos


@pytest.fixture
def old_source(tmp_path: Path) -> Iterator[Path]:
    commit = os.environ.get(FROM)
    assert commit, f"say which commit to upgrade from: {FROM}=COMMIT"
    tree = tmp_path / "old"
    subprocess.run(
        ["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, check=True, capture_output=True
    )
    yield tree / "src"
    subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_a_rolling_upgrade_under_load_loses_nothing(old_source: Path, order: tuple[int, ...]) -> None:
    ledger = Ledger()
    with Cluster(3, environment={"PYTHONPATH": str(old_source)}) as cluster:
        create_topics(cluster.bootstrap, LOADED + MARKED)
        cluster.wait_in_sync("loaded")
        writers = [
            ClusterWriter(number, cluster.bootstrap, ledger, LOADED, number, RECORDS_PER_SECOND)
            for number in range(2)
        ]
        commits = Commits(ledger)
        members = [
            GroupMember(number, cluster.bootstrap, ledger, commits, ["loaded"], "readers")
            for number in range(2)
        ]
        committer = ClusterCommitter(cluster.bootstrap, ledger, MARKED, "committers")
        clients: list[Client] = [*writers, *members, committer]

        def go_on(what: str) -> None:
            before, seen = ledger.acknowledged_count, ledger.seen_count
            wait_until(
                lambda: (
                    ledger.violations
                    or (ledger.acknowledged_count >= before + RECORDS_BETWEEN and ledger.seen_count > seen)
                ),
                PATIENCE_S,
                f"writes and reads go on {what}",
            )
            ledger.raise_violations()

        with running(clients, ledger):
            go_on("on the old version")
            for node in order:
                cluster.nodes[node].environment["PYTHONPATH"] = str(ROOT / "src")
                cluster.restart(node)
                go_on(f"when node {node} is new")
                cluster.wait_in_sync("loaded", deadline_s=PATIENCE_S)
            for node in order:
                cluster.restart(node, kill=True)
                go_on(f"when node {node} was killed and is back")
                cluster.wait_in_sync("loaded", deadline_s=PATIENCE_S)
        ledger.raise_violations()
        readings = read_everything(cluster.bootstrap, LOADED)
        ledger.check(readings)
        for writer in writers:
            writer.check(readings)
        print(
            f"\n{ledger.acknowledged_count} records acknowledged, {ledger.seen_count} read on the way,"
            f" {commits.count}+{committer.commits.count} commits, {commits.looks}+{committer.commits.looks} looks"
        )
        assert committer.commits.looks >= 5
