"""A fourth broker joins three that are at work, and ends with its share of the replicas; nobody notices. And one
that leaves for good is forgotten.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos.clients import running
from tests.chaos.cluster_clients import ClusterWriter, Commits, GroupMember
from tests.chaos.errands import read_everything
from tests.chaos.ledger import Ledger, Place
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.failover import create, write
from tests.support import wait_until

PARTITIONS = 12
REPLICAS = 3
TOPICS = ("loaded", "quiet")
# Of its exact share: placement keeps racks and leaders even too, so it may be off by a few.
SHARE = 0.7
PATIENCE_S = 240.0


@pytest.mark.timeout(500)
def test_a_fourth_broker_takes_its_share_while_clients_work() -> None:
    ledger = Ledger()
    places = [Place("loaded", number) for number in range(PARTITIONS)]
    with Cluster(3) as cluster:
        for topic in TOPICS:
            create(cluster, topic, PARTITIONS, REPLICAS)
        write(cluster, "quiet", 20_000, size=1000)
        writer = ClusterWriter(0, cluster.bootstrap, ledger, places, 1, 500)
        member = GroupMember(0, cluster.bootstrap, ledger, Commits(ledger), ["loaded"], "readers")
        with running([writer, member], ledger):
            wait_until(lambda: ledger.seen_count > 500, 60, "the load has begun")
            newcomer = cluster.add()
            share = len(TOPICS) * PARTITIONS * REPLICAS / len(cluster.nodes)
            wait_until(
                lambda: held(cluster)[newcomer] >= SHARE * share,
                PATIENCE_S,
                f"node {newcomer} is in sync for its share of {share:g} replicas",
            )
            for topic in TOPICS:
                cluster.wait_for(
                    topic,
                    lambda view: len(view.replicas) == REPLICAS == len(view.in_sync_replicas),
                    "nothing is on its way any more",
                    deadline_s=PATIENCE_S,
                )
            before = ledger.acknowledged_count
            wait_until(lambda: ledger.acknowledged_count > before + 500, 60, "the load goes on")
        found = held(cluster)
        print(f"\nreplicas in sync by node: {dict(sorted(found.items()))}")
        assert max(found.values()) <= (2 - SHARE) * share + 1, found
        ledger.check(read_everything(cluster.bootstrap, places))


def test_a_broker_that_is_unregistered_leaves_its_replicas_to_the_others() -> None:
    with Cluster(3) as cluster:
        fourth = cluster.add()
        create(cluster, "loaded", PARTITIONS, REPLICAS)
        assert held(cluster)[fourth]
        write(cluster, "loaded", 1000)
        refused = unregister(cluster, fourth)
        assert refused.returncode == 1
        assert "is running; stop it first" in refused.stderr
        cluster.stop(fourth)
        done = unregister(cluster, fourth)
        assert (done.returncode, done.stdout) == (0, f"unregistered broker {fourth}\n"), done.stderr
        cluster.wait_for(
            "loaded",
            lambda view: fourth not in view.replicas and len(view.in_sync_replicas) == REPLICAS,
            "what it held is in sync elsewhere",
            deadline_s=PATIENCE_S,
        )
        assert "there is no broker" in unregister(cluster, fourth).stderr


def unregister(cluster: Cluster, node: int) -> subprocess.CompletedProcess[str]:
    bootstrap = "{}:{}".format(*cluster.nodes[1].address)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "brokers",
            "unregister",
            str(node),
            "--yes",
            "--bootstrap",
            bootstrap,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def held(cluster: Cluster) -> Counter[int]:
    """How many replicas of the test's topics each node is in sync for."""
    address = cluster.nodes[1].address
    views = wire.partitions(address, TOPICS).values()
    return Counter(node for view in views for node in view.in_sync_replicas)
