"""The journey of docs/guide/securing.md on three real brokers under load: no write is lost on the way.

Each stage is what a file of settings says, reached by restarting one broker after the other. Idempotent producers
with acks=all and members of one group work all the way, first on the plain listener and then on the one with users;
the ledger compares what was acknowledged with what is there in the end.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient

from penstock.cli.main import run
from penstock.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from penstock.protocol.messages.topics import MetadataRequest
from tests.chaos.clients import Client, running
from tests.chaos.cluster_clients import ClusterWriter, Commits, GroupMember, is_absence
from tests.chaos.errands import read_everything
from tests.chaos.ledger import Ledger, Place
from tests.cluster.cluster import LOOPBACK, Cluster, free_ports
from tests.cluster.failover import create
from tests.cluster.wire import METADATA_VERSION, Address, NoAnswer, Wire
from tests.support import wait_until
from tests.tls.authority import Authority
from tests.tls.files import TlsFiles

TOPIC, GROUP = "orders", "billing"
PLACES = [Place(TOPIC, partition) for partition in range(3)]
RECORDS_PER_SECOND = 100
PATIENCE_S = 60.0
NODES = {
    "listener.security.protocol.map": "INTERNAL:SSL",
    "penstock.node.principals": "User:CN=127.0.0.1,OU=x,O=y",
}
AUTHORIZER = {"authorizer.class.name": "acls", "super.users": "User:admin"}
# By the numbers of the guide: settings of every node, and the listeners that it has.
STAGES: list[tuple[dict[str, str], Sequence[str]]] = [
    ({}, ["PLAINTEXT"]),
    ({**NODES, "penstock.internal.security": "accepted"}, ["PLAINTEXT"]),
    ({**NODES, "penstock.internal.security": "preferred"}, ["PLAINTEXT", "SASL_SSL"]),
    ({**NODES, **AUTHORIZER, "allow.everyone.if.no.acl.found": "true"}, ["PLAINTEXT", "SASL_SSL"]),
    ({**NODES, **AUTHORIZER}, ["SASL_SSL"]),
]


class Journey:
    """A cluster on its way, and the clients that it has at the moment."""

    def __init__(self, cluster: Cluster, directory: Path, *, is_rough: bool) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self.writers: list[ClusterWriter] = []
        self.errors: list[KafkaError] = []
        self.admin_file = directory / "admin.properties"
        self._directory = directory
        self._commits = Commits(self.ledger)
        # One broker of each round is killed, not stopped.
        self._is_rough = is_rough
        self._listeners, self._common_listener = STAGES[0][1], "PLAINTEXT"
        self._authority = Authority()
        self.files = {}
        for node_id in cluster.nodes:
            of_node = directory / f"node-{node_id}"
            of_node.mkdir()
            self.files[node_id] = TlsFiles(of_node, self._authority)
        self.secure_ports = dict(zip(cluster.nodes, free_ports(len(cluster.nodes)), strict=True))

    @property
    def secure_bootstrap(self) -> str:
        return ",".join(f"{LOOPBACK}:{port}" for port in self.secure_ports.values())

    def context(self) -> ssl.SSLContext:
        return self._authority.client()

    def credentials(self, user: str) -> dict[str, Any]:
        """As librdkafka names them. The password is for everybody to guess: it is a test."""
        return {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(self.files[1].authorities),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": f"the password of {user}",
        }

    def admin(self) -> AdminClient:
        """On a listener that all brokers have, also in the middle of a rolling restart."""
        if self._common_listener == "PLAINTEXT":
            return AdminClient({"bootstrap.servers": self.cluster.bootstrap})
        return AdminClient({"bootstrap.servers": self.secure_bootstrap, **self.credentials("admin")})

    # What an administrator does

    def go_to(self, stage: int) -> None:
        """A rolling restart."""
        common, listeners = STAGES[stage]
        self._common_listener = next(name for name in listeners if name in self._listeners)
        for node_id, node in self.cluster.nodes.items():
            ports = {"PLAINTEXT": node.port, "SASL_SSL": self.secure_ports[node_id]}
            node.settings = {
                "listeners": ",".join(f"{name}://{LOOPBACK}:{ports[name]}" for name in listeners),
                "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
                **self.files[node_id].settings("none"),
                **common,
            }
            self.restart(node_id, kill=self._is_rough and node_id == 1 + stage % 3)
        self._listeners = listeners

    def restart(self, node_id: int, *, kill: bool = False) -> None:
        self.cluster.restart(node_id, kill=kill)
        admin = self.admin()

        def is_in_sync() -> bool:
            found = admin.list_topics(TOPIC, timeout=PATIENCE_S)
            partitions = found.topics[TOPIC].partitions.values()
            return len(found.brokers) == len(self.cluster.nodes) and all(
                sorted(each.isrs) == sorted(each.replicas) for each in partitions
            )

        wait_until(is_in_sync, PATIENCE_S, f"all replicas are in sync again after node {node_id}")
        self.wait_for_more()

    def command(self, *words: str, config: Path | None = None, code: int = 0) -> None:
        """`penstock WORDS...`, on the plain listener or with a file."""
        where = ["--bootstrap", self.cluster.bootstrap] if config is None else ["--config", str(config)]
        assert run([*words, *where]) == code, words

    def add_user(self, user: str, *, config: Path | None = None) -> Path:
        """By the commands of the guide; the file with which commands log in as this user."""
        password = self._directory / f"{user}.password"
        password.write_text(f"the password of {user}\n")
        self.command("users", "add", user, "--password-file", str(password), config=config)
        lines = {"bootstrap.servers": self.secure_bootstrap, **self.credentials(user)}
        path = self._directory / f"{user}.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        return path

    # What clients do

    @contextmanager
    def clients(self, bootstrap: str, security: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Two producers and a member of the group, at work."""
        security = {**(security or {}), "error_cb": self._noted}
        writers = []
        for _ in range(2):
            number = len(self.writers)
            writers.append(
                ClusterWriter(
                    number, bootstrap, self.ledger, PLACES, number, RECORDS_PER_SECOND, security=security
                )
            )
            self.writers.append(writers[-1])
        member = GroupMember(number, bootstrap, self.ledger, self._commits, [TOPIC], GROUP, security=security)
        clients: list[Client] = [*writers, member]
        with running(clients, self.ledger):
            self.wait_for_more()
            yield

    def _noted(self, error: KafkaError) -> None:
        if not is_absence(error):
            self.errors.append(error)

    def wait_for_more(self) -> None:
        before = self.ledger.acknowledged_count
        wait_until(
            lambda: self.ledger.violations or self.ledger.acknowledged_count > before + 50,
            PATIENCE_S,
            "writes go on",
        )
        self.check()

    def check(self) -> None:
        self.ledger.raise_violations()
        assert not self.errors

    def wait_until_read(self) -> None:
        """By the group, on whichever listener its members were."""
        written = self.ledger.acknowledged_count
        wait_until(lambda: self.ledger.seen_count >= written, PATIENCE_S, "the group has read everything")

    def check_everything(self, bootstrap: str, security: Mapping[str, Any] | None = None) -> None:
        self.check()
        readings = read_everything(bootstrap, PLACES, security)
        self.ledger.check(readings)
        for writer in self.writers:
            writer.check(readings)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "is_long",
    [
        pytest.param(False, id="there"),
        pytest.param(True, id="there-and-back", marks=pytest.mark.interop_long),
    ],
)
def test_a_cluster_becomes_secure_without_losing_a_write(tmp_path: Path, is_long: bool) -> None:
    with Cluster(3) as cluster, ExitStack() as plain, ExitStack() as secure:
        create(cluster, TOPIC, len(PLACES))
        journey = Journey(cluster, tmp_path, is_rough=is_long)
        plain.enter_context(journey.clients(cluster.bootstrap))
        journey.go_to(1)
        journey.go_to(2)
        # The first user is made on the plain listener: nobody can log in before.
        admin = journey.add_user("admin")
        for user in ("alice", "bob", "carol"):
            journey.add_user(user, config=admin)
        # Clients move one by one: new ones begin to work while the old ones still do, in one group.
        secure.enter_context(journey.clients(journey.secure_bootstrap, journey.credentials("alice")))
        if is_long:
            journey.restart(cluster.controller(), kill=True)
        plain.close()
        journey.go_to(3)
        for words in (["--producer", "--consumer", "--group", GROUP], ["--operation", "describe"]):
            user = "alice" if "--producer" in words else "carol"
            journey.command("acls", "add", "--principal", user, "--topic", TOPIC, *words, config=admin)
        journey.wait_for_more()
        journey.go_to(4)

        plain_clients_are_out(journey)
        assert refusal(journey, "bob") == KafkaError.TOPIC_AUTHORIZATION_FAILED
        certificates_are_replaced(journey)
        removed_user_is_out(journey, "carol", admin)
        if is_long:
            for stage in (2, 1, 0):
                journey.go_to(stage)
                if stage == 2:
                    plain.enter_context(journey.clients(cluster.bootstrap))
                    secure.close()
        journey.wait_until_read()
        journey.check()
        plain.close()
        secure.close()
        if is_long:
            journey.check_everything(cluster.bootstrap)
        else:
            journey.check_everything(journey.secure_bootstrap, journey.credentials("admin"))
        print(f"\nrecords written: {journey.ledger.acknowledged_count}")


def plain_clients_are_out(journey: Journey) -> None:
    for node in journey.cluster.nodes.values():
        with pytest.raises(NoAnswer):
            Wire(node.address)
        # In plain text on the port that is left, and with TLS but without a user.
        for context in (None, journey.context()):
            with (
                Wire((LOOPBACK, journey.secure_ports[node.id]), context=context) as wire,
                pytest.raises(NoAnswer),
            ):
                wire.call(MetadataRequest(topics=[]), METADATA_VERSION)


def refusal(journey: Journey, user: str) -> int:
    """The error that a producer gets for its record."""
    codes: list[int] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        codes.append(0 if error is None else error.code())

    settings = {"bootstrap.servers": journey.secure_bootstrap, **journey.credentials(user), "log_level": 0}
    producer = Producer(settings)
    producer.produce(TOPIC, b"x", on_delivery=delivered)
    assert producer.flush(PATIENCE_S) == 0
    (code,) = codes
    return code


def certificates_are_replaced(journey: Journey) -> None:
    """Of the listener and of the node, on all three under load."""
    doors: list[Address] = [(LOOPBACK, port) for port in journey.secure_ports.values()]
    doors += [(LOOPBACK, node.internal_port) for node in journey.cluster.nodes.values()]
    before = {door: certificate(door, journey.context()) for door in doors}
    for files in journey.files.values():
        files.replace_keystore(valid_days=200)
    for door in doors:
        wait_until(
            lambda: certificate(door, journey.context()) != before[door],  # noqa: B023
            PATIENCE_S,
            f"new connections to {door} see the new certificate",
        )
    journey.wait_for_more()
    # Now everybody connects to it, and it to everybody, with new certificates.
    journey.restart(2)


def certificate(address: Address, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection(address, PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return found


def removed_user_is_out(journey: Journey, user: str, admin: Path) -> None:
    """On connections to all three brokers that are open, and in use."""
    with ExitStack() as stack:
        inside: dict[int, Wire] = {}
        for node_id, port in journey.secure_ports.items():
            wire = stack.enter_context(Wire((LOOPBACK, port), context=journey.context()))
            assert not wire.call(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code
            proof = f"\0{user}\0the password of {user}".encode()
            assert not wire.call(SaslAuthenticateRequest(auth_bytes=proof), 2).error_code
            inside[node_id] = wire

        def put_out() -> list[int]:
            """Those that closed the connection since we last looked."""
            found = []
            for node_id, wire in list(inside.items()):
                try:
                    wire.call(MetadataRequest(topics=[]), METADATA_VERSION)
                except NoAnswer:
                    del inside[node_id]
                    found.append(node_id)
            return found

        assert put_out() == []
        journey.command("users", "remove", user, "--yes", config=admin)
        began = time.monotonic()
        while inside:
            for node_id in put_out():
                print(
                    f"\nnode {node_id} put {user} out after {(time.monotonic() - began) * 1000:.0f} ms",
                    end="",
                )
            assert time.monotonic() < began + PATIENCE_S, f"{user} is still at {list(inside)}"
    journey.wait_for_more()
