"""Simulated clusters whose nodes have to prove themselves to each other, with clients at work all the time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.controller.envelopes import unsealed
from penstock.broker.network.authorization import ANONYMOUS
from penstock.broker.network.connection import Call
from penstock.protocol.messages.forwarding import EnvelopeRequest
from penstock.sim import swarm
from penstock.sim.cluster import Machine
from penstock.sim.plans import plan_for
from tests.tls.authority import Authority

NODES = (1, 2, 3)
SECRET, NEW_SECRET = "s3cret-of-the-whole-cluster", "a-new-s3cret-for-all-of-it"
PROTOCOLS = ("SSL", "SASL_SSL", "SASL_PLAINTEXT")


class Files:
    """The certificates and the secret of each node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority, self.other_authority = Authority(), Authority()
        for node in NODES:
            self.write_certificate(node, f"node-{node}")
            self.write_secret(node, SECRET)

    def write_certificate(
        self, node: int, name: str, *, authority: Authority | None = None, trusts: Authority | None = None
    ) -> None:
        chain, key = (authority or self.authority).issue(name, is_host=True)
        self._replace(f"{node}.pem", key + chain)
        self._replace(f"{node}-ca.pem", (trusts or self.authority).pem)

    def write_secret(self, node: int, *lines: str) -> None:
        self._replace(f"{node}.secret", "\n".join(lines))

    def settings(self, node: int, protocol: str, stage: str = "required") -> dict[str, str]:
        settings = {
            "listener.security.protocol.map": f"INTERNAL:{protocol}",
            "penstock.internal.security": stage,
        }
        if protocol != "SASL_PLAINTEXT":
            settings["listener.name.internal.ssl.keystore.location"] = str(self.directory / f"{node}.pem")
            settings["listener.name.internal.ssl.truststore.location"] = str(
                self.directory / f"{node}-ca.pem"
            )
        if protocol == "SSL":
            principals = [f"User:CN=node-{each},OU=x,O=y" for each in NODES]
            settings["penstock.node.principals"] = "; ".join(principals)
        else:
            settings["penstock.internal.secret.file"] = str(self.directory / f"{node}.secret")
        return settings

    def _replace(self, name: str, text: str) -> None:
        new = self.directory / "new"
        new.touch(mode=0o600)
        new.write_text(text)
        os.replace(new, self.directory / name)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class Secured:
    """A cluster with its clients, which goes on while nodes are restarted with other settings."""

    def __init__(self, settings: Mapping[int, Mapping[str, str]], seed: int = 3) -> None:
        plan = replace(
            plan_for(seed, seconds=20, nodes=3),
            data_dirs=1,
            administers=False,
            partitions=2,
            producers=1,
            one_shot_producers=0,
            readers=1,
            members=0,
            splits=0.0,
            cold_reads=0.0,
            evictions=0.0,
            produce_interval_ms=200.0,
        )
        self.run = swarm.Run(plan)
        self.settings: dict[int, Mapping[str, str]] = dict(settings)
        self.run.cluster._settings_of = self.settings
        self.run._begin()

    def machine(self, node: int) -> Machine:
        return self.run.cluster.machines[node]

    def become_whole(self) -> None:
        """All nodes serve, and all replicas are in sync."""
        run = self.run
        assert run.loop.run_until(run.inspector.is_whole, swarm.LIVENESS_MS), run.inspector.what_is_missing()

    def stop(self, node: int) -> None:
        machine = self.machine(node)
        self.run.cluster.stop(machine)
        assert self.run.loop.run_until(lambda: not machine.is_running, 20_000)

    def start(self, node: int, settings: Mapping[str, str]) -> None:
        self.settings[node] = settings
        self.run.cluster.start(self.machine(node))

    def restart(self, node: int, settings: Mapping[str, str]) -> None:
        self.stop(node)
        self.start(node, settings)

    def logged(self, node: int, text: str) -> list[str]:
        return [line for line in self.run.cluster.lines if f" node-{node} " in line and text in line]

    def finish(self) -> None:
        """The clients get everything they were promised."""
        self.become_whole()
        run = self.run
        run._is_closing = True
        for producer in run.producers:
            producer.is_open = False
        assert run.loop.run_until(lambda: all(each.is_idle for each in run.producers), swarm.LIVENESS_MS)
        run._end()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nodes_that_prove_themselves_are_a_cluster(
    files: Files, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    open_envelope = ControllerClient.open

    def opens(self: ControllerClient, envelope: EnvelopeRequest, call: Call) -> object:
        opened.append(unsealed(envelope))
        return open_envelope(self, envelope, call)

    monkeypatch.setattr(ControllerClient, "open", opens)
    cluster = Secured({node: files.settings(node, protocol) for node in NODES})
    cluster.become_whole()
    for node in NODES:
        cluster.run._make_topic(f"through-any-broker-{node}", 1)
    cluster.finish()
    assert opened and {each.requester.principal for each in opened} == {ANONYMOUS}
    assert not any("did not admit" in line for line in cluster.run.cluster.lines)


def test_a_plain_cluster_becomes_secure_by_three_rolling_restarts(files: Files) -> None:
    protocol = "SSL"
    cluster = Secured({})
    cluster.become_whole()
    for stage in ("accepted", "preferred", "required"):
        for node in NODES:
            cluster.restart(node, files.settings(node, protocol, stage))
            cluster.become_whole()
    # Now a node that connects as before stays outside.
    cluster.stop(1)
    cluster.start(1, {})
    cluster.run.loop.run_for(15_000)
    outside = cluster.machine(1).node
    assert outside is not None and not outside.is_active
    assert cluster.logged(2, "did not admit a node") + cluster.logged(3, "did not admit a node")
    cluster.restart(1, files.settings(1, protocol))
    cluster.finish()


def test_a_secret_is_replaced_without_a_restart(files: Files) -> None:
    cluster = Secured({node: files.settings(node, "SASL_PLAINTEXT") for node in NODES})
    cluster.become_whole()
    # While files differ, a node connects anew.
    for lines in ((NEW_SECRET, SECRET), (NEW_SECRET,)):
        files.write_secret(1, *lines)
        cluster.run.loop.run_for(2_000)
        cluster.run.cluster.crash(cluster.machine(2))
        cluster.start(2, files.settings(2, "SASL_PLAINTEXT"))
        cluster.become_whole()
        files.write_secret(2, *lines)
        files.write_secret(3, *lines)
        cluster.run.loop.run_for(2_000)
    assert cluster.logged(2, "use the changed secret")
    cluster.finish()


def test_certificates_and_their_authority_are_replaced_without_a_restart(files: Files) -> None:
    cluster = Secured({node: files.settings(node, "SSL") for node in NODES})
    cluster.become_whole()
    both = Authority()
    both.pem = files.authority.pem + files.other_authority.pem
    for authority, trusts in (
        (files.authority, both),
        (files.other_authority, both),
        (files.other_authority, files.other_authority),
    ):
        for node in NODES:
            files.write_certificate(node, f"node-{node}", authority=authority, trusts=trusts)
        cluster.run.loop.run_for(3_000)
    # All connections of node 1 are new.
    cluster.run.cluster.crash(cluster.machine(1))
    cluster.start(1, files.settings(1, "SSL"))
    cluster.become_whole()
    assert cluster.logged(2, "new connections use the changed certificates")
    assert not any("did not admit" in line for line in cluster.run.cluster.lines)
    cluster.finish()


def test_a_node_without_the_right_proof_stays_outside_and_nobody_notices(files: Files) -> None:
    cluster = Secured({node: files.settings(node, "SSL") for node in NODES})
    cluster.become_whole()
    cluster.stop(3)
    # It may have been the leader.
    cluster.run.loop.run_for(5_000)
    epochs = _epochs(cluster)

    def stays_outside(settings: Mapping[str, str], reason: str) -> None:
        before = cluster.run.checkers.promises.acknowledged
        cluster.start(3, settings)
        cluster.run.loop.run_for(4_000)
        node = cluster.machine(3).node
        assert node is not None and not node.is_active
        assert any(
            cluster.logged(each, f"did not admit a node peer=node-3 reason={reason}") for each in (1, 2)
        )
        assert _epochs(cluster) == epochs, "nobody was unseated"
        assert cluster.run.checkers.promises.acknowledged > before
        cluster.run.cluster.crash(cluster.machine(3))

    stays_outside({}, "the TLS handshake failed: the peer does not speak TLS")
    files.write_certificate(3, "node-3", authority=files.other_authority)
    stays_outside(
        files.settings(3, "SSL"), "the TLS handshake failed: the peer's certificate is not accepted"
    )
    # One of a client, from the right authority. With the others' list, the node would not even start.
    files.write_certificate(3, "alice")
    settings = files.settings(3, "SSL")
    settings["penstock.node.principals"] += ";User:CN=alice,OU=x,O=y"
    stays_outside(settings, "User:CN=alice,OU=x,O=y is not one of penstock.node.principals")
    # With the right proof it is one of them again.
    files.write_certificate(3, "node-3")
    cluster.start(3, files.settings(3, "SSL"))
    cluster.finish()


def test_a_node_does_not_send_requests_to_a_host_that_the_certificate_is_not_for(files: Files) -> None:
    cluster = Secured({node: files.settings(node, "SSL") for node in NODES})
    cluster.become_whole()
    cluster.stop(3)
    files.write_certificate(3, "node-2")
    cluster.start(3, files.settings(3, "SSL"))
    cluster.run.loop.run_for(10_000)
    reason = "cannot connect to a node host=node-3"
    assert cluster.logged(1, reason) + cluster.logged(2, reason)
    # Unless it is told not to look.
    algorithm = {"listener.name.internal.ssl.endpoint.identification.algorithm": ""}
    for node in (1, 2):
        cluster.restart(node, {**files.settings(node, "SSL"), **algorithm})
    cluster.finish()


def _epochs(cluster: Secured) -> list[int]:
    """The quorum's epoch, as nodes 1 and 2 know it."""
    nodes = [cluster.machine(each).node for each in (1, 2)]
    return [node.quorum_epoch for node in nodes if node is not None]
