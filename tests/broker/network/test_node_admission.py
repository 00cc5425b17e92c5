"""Nodes and strangers at the door of a node, over a simulated network: who gets in, and what it costs others."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.internal_settings import internal_security
from penstock.broker.network import node_admission
from penstock.broker.network.node_admission import ADMISSION_TIMEOUT_MS, NodeAdmission
from penstock.broker.network.node_connector import REFUSED_PAUSE_MS, TIMEOUT_MS, NodeConnector
from penstock.broker.network.node_sasl import FRAME_BYTES_MAX
from penstock.broker.network.node_security import NodeSecurity
from penstock.environment import Environment, Stream
from penstock.protocol.apis import INTERNAL, advertised
from penstock.protocol.requests import request_frame
from penstock.sim.loop import Loop, Process, Streams
from penstock.sim.network import Fabric
from tests.tls.authority import Authority

PORT = 9090
SECRET, OLD_SECRET = "s3cret-of-the-whole-cluster", "the-s3cret-that-it-had-before"
HTTP = b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(180)


class Logger:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.events.append((event, values))

    warning = error = info


class Party:
    """A process with its environment."""

    def __init__(self, scene: Scene, host: str) -> None:
        self.loop = scene.loop
        self.process = Process(scene.loop, host)
        nothing: Any = None
        self.environment = Environment(
            clock=self.process.clock,
            files=nothing,
            network=scene.fabric.door(self.process),
            random=random.Random(host),
            spawn=self.process.spawn,
            processes=nothing,
        )
        logger: Any = Logger()
        self.logger = logger

    def do(self, work: Callable[[], object], for_ms: float = 300) -> None:

        def done() -> None:
            work()

        self.process.spawn.soon(done)
        self.loop.run_for(for_ms)

    def connect_and_stop(self, first_bytes: bytes = b"") -> None:
        """Connect to the node, send no more than this, and do not read."""

        def connected(stream: Stream | None, error: OSError | None) -> None:
            assert stream is not None
            stream.send([first_bytes])

        self.environment.network.connect("node", PORT, connected)


class Node(Party):
    """A node that answers every frame of those it admits with the same bytes."""

    def __init__(self, scene: Scene, host: str, settings: dict[str, str]) -> None:
        super().__init__(scene, host)
        self.security = NodeSecurity(self.environment, self.logger, internal_security(settings))
        self.admission = NodeAdmission(self.environment, self.logger, self.security)
        self.connector = NodeConnector(self.environment, self.logger, self.security)
        self.admitted: list[Stream] = []
        self.received = bytearray()
        self.do(lambda: self.admission.listen(host, PORT, self._admitted), 1)

    def _admitted(self, stream: Stream) -> None:
        self.admitted.append(stream)
        stream.on_readable(lambda: self._readable(stream))

    def _readable(self, stream: Stream) -> None:
        buffer = bytearray(65536)
        count = stream.recv_into(memoryview(buffer))
        if count:
            self.received += buffer[:count]
            stream.send([bytes(buffer[:count])])
        elif count == 0:
            stream.close()

    def connect(self, host: str, for_ms: float = 500) -> Stream | str:
        """The stream, or why there is none."""
        found: list[Any] = []
        self.do(lambda: self.connector.connect(host, PORT, lambda *result: found.extend(result)), for_ms)
        assert len(found) == 2, "called once"
        return found[0] if found[0] is not None else str(found[1])

    def reasons(self) -> list[str]:
        return [values["reason"] for event, values in self.logger.events if event == "did not admit a node"]


class Stranger(Party):
    """Sends bytes and keeps what comes back."""

    def __init__(self, scene: Scene, host: str = "stranger") -> None:
        super().__init__(scene, host)
        self.stream: Stream | None = None
        self.received = b""
        self.is_closed = False

    def connect(self) -> None:
        def connected(stream: Stream | None, error: OSError | None) -> None:
            assert stream is not None
            self.stream = stream
            stream.on_readable(self._readable)

        self.do(lambda: self.environment.network.connect("node", PORT, connected))

    def _readable(self) -> None:
        assert self.stream is not None
        buffer = bytearray(65536)
        try:
            count = self.stream.recv_into(memoryview(buffer))
        except OSError:
            count = 0
        if count:
            self.received += buffer[:count]
        elif count == 0:
            self.is_closed = True
            self.stream.close()

    def send(self, data: bytes) -> None:
        def sent() -> None:
            assert self.stream is not None
            rest = data
            try:
                while rest:
                    count = self.stream.send([rest])
                    if count == 0:
                        break
                    rest = rest[count:]
            except OSError:
                self.is_closed = True

        self.do(sent)


class Scene:
    def __init__(self, directory: Path, authority: Authority) -> None:
        self.loop = Loop(Streams(1))
        self.fabric = Fabric(self.loop)
        self.directory = directory
        self.authority = authority

    def settings(self, protocol: str, name: str = "node", stage: str = "required") -> dict[str, str]:
        chain, key = self.authority.issue(name, is_host=True)
        settings = {
            "listener.security.protocol.map": f"INTERNAL:{protocol}",
            "penstock.internal.security": stage,
        }
        if protocol != "SASL_PLAINTEXT":
            settings["ssl.keystore.certificate.chain"] = chain
            settings["ssl.keystore.key"] = key
            settings["ssl.truststore.certificates"] = self.authority.pem
        if protocol == "SSL":
            settings["penstock.node.principals"] = "User:CN=node,OU=x,O=y;User:CN=other,OU=x,O=y"
        else:
            settings["penstock.internal.secret.file"] = self.secret(name, SECRET)
        return settings

    def secret(self, name: str, *lines: str) -> str:
        path = self.directory / f"{name}.secret"
        path.touch(mode=0o600)
        path.write_text("\n".join(lines))
        return str(path)

    def node(self, protocol: str, host: str = "node", stage: str = "required", **settings: str) -> Node:
        given = {**self.settings(protocol, host, stage)}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        return Node(self, host, given)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def scene(tmp_path: Path, authority: Authority) -> Scene:
    return Scene(tmp_path, authority)


PROTOCOLS = pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL", "SASL_PLAINTEXT"])


@PROTOCOLS
def test_a_node_gets_in_and_its_bytes_go_both_ways(scene: Scene, protocol: str) -> None:
    node, other = scene.node(protocol), scene.node(protocol, "other")
    stream = other.connect("node")
    assert not isinstance(stream, str), stream
    assert len(node.admitted) == 1 and len(node.admission) == 0
    received = bytearray()

    def readable() -> None:
        buffer = bytearray(100)
        count = stream.recv_into(memoryview(buffer))
        received.extend(buffer[: count or 0])

    # What comes first is not lost, and nothing of the admission is left over.
    node.received.clear()
    other.do(lambda: stream.on_readable(readable))
    other.do(lambda: stream.send([b"hello"]))
    assert (bytes(node.received), bytes(received)) == (b"hello", b"hello")


def requests() -> list[bytes]:
    """One request for each API that nodes are served, with nothing in it."""
    return [
        b"".join(request_frame(api, api.version_max, 1, b"x", api.request())) for api in advertised(INTERNAL)
    ]


@PROTOCOLS
def test_no_request_is_read_before_admission(scene: Scene, protocol: str) -> None:
    node = scene.node(protocol)
    # Vote, BeginQuorumEpoch, AlterPartition, WriteTxnMarkers and a replica's Fetch are among them.
    for number, request in enumerate(requests()):
        stranger = Stranger(scene, f"stranger-{number}")
        stranger.connect()
        stranger.send(request)
        key = struct.unpack_from(">h", request, 4)[0]
        if key == 17 and protocol == "SASL_PLAINTEXT":
            assert stranger.is_closed and b"SCRAM-SHA-512" in stranger.received, "which mechanism it is"
        else:
            # With TLS, an alert.
            assert stranger.is_closed and len(stranger.received) <= 7, key
    assert not node.admitted and not node.received and len(node.admission) == 0


@PROTOCOLS
@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">i", 3) + b"abc",
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", FRAME_BYTES_MAX + 1),
        HTTP,
        bytes(100_000),
        b"\xff" * 100,
        CLIENT_HELLO,
        struct.pack(">ihhih", 10, 17, 99, 1, -1),
        struct.pack(">ihhih", 10, 17, 1, 1, 32767),
        struct.pack(">ihhihh", 12, 17, 1, 1, -1, -1),
        struct.pack(">ihhih", 10, 36, 2, 1, -1),
        # A request that does not wait for its answer.
        2 * (struct.pack(">ihhihh", 25, 17, 1, 1, -1, 13) + b"SCRAM-SHA-512"),
    ],
    ids=str,
)
def test_bad_bytes_close_the_connection(scene: Scene, protocol: str, data: bytes) -> None:
    node = scene.node(protocol)
    stranger = Stranger(scene)
    stranger.connect()
    stranger.send(data)
    scene.loop.run_for(ADMISSION_TIMEOUT_MS + 2_000)
    assert stranger.is_closed
    assert not node.admitted and not node.received and len(node.admission) == 0


@PROTOCOLS
def test_a_peer_that_says_nothing_is_closed_in_time(scene: Scene, protocol: str) -> None:
    node = scene.node(protocol)
    silent, slow = Stranger(scene, "silent"), Stranger(scene, "slow")
    for stranger in (silent, slow):
        stranger.connect()
    for _ in range(5):
        slow.send(b"\0")
        scene.loop.run_for(ADMISSION_TIMEOUT_MS / 5 + 500)
    assert silent.is_closed and slow.is_closed and len(node.admission) == 0


@PROTOCOLS
def test_strangers_are_limited_and_nodes_still_get_in(
    scene: Scene, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_admission, "PENDING_PER_HOST_MAX", 5)
    node, other = scene.node(protocol), scene.node(protocol, "other")
    stranger = Stranger(scene)
    for _ in range(8):
        stranger.connect()
    assert len(node.admission) == 5
    assert not isinstance(other.connect("node"), str)


@PROTOCOLS
@pytest.mark.parametrize("are_silent", [True, False])
def test_strangers_from_many_hosts_do_not_keep_nodes_out(
    scene: Scene, protocol: str, are_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = struct.pack(">ihh", 100, 17, 1) if protocol == "SASL_PLAINTEXT" else CLIENT_HELLO[:6]
    monkeypatch.setattr(node_admission, "PENDING_PER_HOST_MAX", 4)
    monkeypatch.setattr(node_admission, "PENDING_MAX", 10)
    node, other = scene.node(protocol), scene.node(protocol, "other")
    strangers = [Party(scene, f"stranger-{number}") for number in range(3)]
    for stranger in strangers:
        for _ in range(4):
            stranger.do(partial(stranger.connect_and_stop, b"" if are_silent else begun), 10)
    assert len(node.admission) == 10
    found: list[Any] = []
    other.do(lambda: other.connector.connect("node", PORT, lambda *result: found.extend(result)), 0)
    # Strangers go on coming while the node proves that it is one.
    for number in range(12):
        strangers[number % 3].do(strangers[number % 3].connect_and_stop, 10)
    scene.loop.run_for(300)
    assert found and found[0] is not None, found
    assert len(node.admitted) == 1 and len(node.admission) <= 10
    scene.loop.run_for(ADMISSION_TIMEOUT_MS + 2_000)
    assert len(node.admission) == 0


@PROTOCOLS
def test_strangers_at_the_host_of_a_node_do_not_keep_it_out(
    scene: Scene, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_admission, "PENDING_PER_HOST_MAX", 4)
    node, other = scene.node(protocol), scene.node(protocol, "other")
    for _ in range(8):
        other.do(other.connect_and_stop)
    assert len(node.admission) == 4
    assert not isinstance(other.connect("node"), str)


def test_the_log_is_not_filled(scene: Scene) -> None:
    node = scene.node("SASL_PLAINTEXT")
    for _ in range(100):
        node.do(lambda: node.admission._note("stranger", "a reason"), 1)
    assert len(node.reasons()) == node_admission.REFUSALS_LOGGED
    scene.loop.run_for(node_admission.REFUSALS_WINDOW_MS)
    node.do(lambda: node.admission._note("stranger", "a reason"))
    assert node.logger.events[-2] == ("not all refused nodes were logged", {"count": 100})
    assert len(node.reasons()) == node_admission.REFUSALS_LOGGED + 1


def test_a_wrong_secret_is_refused_and_told_so(scene: Scene) -> None:
    node, other = scene.node("SASL_PLAINTEXT"), scene.node("SASL_PLAINTEXT", "other")
    wrong = scene.secret("wrong", "another-s3cret-of-somebody-else")
    third = scene.node("SASL_PLAINTEXT", "third", penstock_internal_secret_file=wrong)
    assert "SASL_AUTHENTICATION_FAILED; do both have the same secret?" in str(third.connect("node"))
    assert node.reasons() == ["invalid credentials"]
    assert not node.admitted
    # The next attempt comes after a pause, and others are not affected.
    assert "a moment ago" in str(third.connect("node", REFUSED_PAUSE_MS / 2))
    assert not isinstance(other.connect("node"), str)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ((SECRET, OLD_SECRET), (OLD_SECRET,)),
        ((OLD_SECRET,), (SECRET, OLD_SECRET)),
        ((SECRET, OLD_SECRET), (SECRET,)),
        ((SECRET,), (SECRET, OLD_SECRET)),
        ((SECRET, OLD_SECRET), (OLD_SECRET, SECRET)),
    ],
)
def test_while_the_secret_is_replaced_every_pair_of_nodes_has_one_in_common(
    scene: Scene, here: tuple[str, ...], there: tuple[str, ...]
) -> None:
    scene.node("SASL_PLAINTEXT", penstock_internal_secret_file=scene.secret("there", *there))
    other = scene.node("SASL_PLAINTEXT", "other", penstock_internal_secret_file=scene.secret("here", *here))
    attempts = [other.connect("node") for _ in range(2)]
    assert not isinstance(attempts[-1], str), attempts
    # What worked is used from now on.
    assert not isinstance(other.connect("node"), str)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_channels_that_fail_together_with_the_new_secret_all_try_the_old_one(
    scene: Scene, channels: int
) -> None:
    """After a restart a node connects through several channels at once, and the file has two secrets."""
    scene.node("SASL_PLAINTEXT", penstock_internal_secret_file=scene.secret("there", OLD_SECRET))
    other = scene.node(
        "SASL_PLAINTEXT", "other", penstock_internal_secret_file=scene.secret("here", SECRET, OLD_SECRET)
    )

    def attempt() -> list[bool]:
        found: list[bool] = []

        def connect_all() -> None:
            for _ in range(channels):
                other.connector.connect("node", PORT, lambda stream, error: found.append(stream is not None))

        other.do(connect_all)
        assert len(found) == channels
        return found

    assert not any(attempt())
    assert all(attempt())
    assert all(attempt())


def test_a_stranger_does_not_get_the_requests_of_a_node(scene: Scene) -> None:
    """A process that listens at the address of a node has to prove itself too."""
    other = scene.node("SASL_PLAINTEXT", "other")
    wrong = scene.secret("wrong", "another-s3cret-of-somebody-else")
    scene.node("SASL_PLAINTEXT", "node", penstock_internal_secret_file=wrong)
    assert isinstance(other.connect("node"), str)
    # One that accepts everything, without knowing the secret.
    liar = Party(scene, "liar")
    seen = bytearray()

    def accept(stream: Stream) -> None:
        def readable() -> None:
            buffer = bytearray(1000)
            count = stream.recv_into(memoryview(buffer))
            seen.extend(buffer[: count or 0])
            if count:
                stream.send([struct.pack(">iihi", 10, 1, 0, 0)])

        stream.on_readable(readable)

    liar.do(lambda: liar.environment.network.listen("liar", PORT, accept))
    assert isinstance(other.connect("liar", TIMEOUT_MS + 1_000), str)
    assert SECRET.encode() not in seen


def test_a_certificate_of_the_authority_is_not_enough(scene: Scene) -> None:
    node = scene.node("SSL")
    alice = scene.node(
        "SSL", "alice", penstock_node_principals="User:CN=alice,OU=x,O=y;User:CN=node,OU=x,O=y"
    )
    assert "one of penstock.node.principals there?" in str(alice.connect("node"))
    assert node.reasons() == ["User:CN=alice,OU=x,O=y is not one of penstock.node.principals"]
    # Nor does a node send its requests to a client that has its own certificate.
    assert "it is not a node" in str(node.connect("alice"))
    assert not node.admitted and not alice.received


def test_certificates_of_another_authority_are_refused_on_both_sides(scene: Scene, tmp_path: Path) -> None:
    node = scene.node("SSL")
    foreign = Scene(tmp_path, Authority())
    foreign.loop, foreign.fabric = scene.loop, scene.fabric
    other = foreign.node("SSL", "other")
    assert "certificate is not accepted" in str(other.connect("node"))
    assert "certificate is not accepted" in str(node.connect("other"))
    assert not node.admitted and not other.admitted


@PROTOCOLS
@pytest.mark.parametrize("stage", ["accepted", "preferred"])
def test_on_the_way_to_security_a_node_accepts_both(scene: Scene, protocol: str, stage: str) -> None:
    node, other = scene.node(protocol, stage=stage), scene.node(protocol, "other")
    assert not isinstance(other.connect("node"), str)
    plain = Stranger(scene, "plain")
    plain.connect()
    request = requests()[0]
    for byte in request:
        plain.do(lambda: plain.stream and plain.stream.send([bytes([byte])]), 5)  # noqa: B023
    scene.loop.run_for(100)
    assert plain.received == request, "the first bytes are not lost"
    assert len(node.admitted) == 2
    # And connects in plain text, or not.
    stream = node.connect("other")
    if stage == "accepted":
        node.do(lambda: stream.send([request]))  # type: ignore[union-attr]
        assert len(other.admitted) == 0
    else:
        assert len(other.admitted) == 1


def test_a_wrong_proof_is_refused_also_where_none_is_needed(scene: Scene) -> None:
    node = scene.node("SASL_PLAINTEXT", stage="preferred")
    wrong = scene.secret("wrong", "another-s3cret-of-somebody-else")
    other = scene.node("SASL_PLAINTEXT", "other", penstock_internal_secret_file=wrong)
    assert isinstance(other.connect("node"), str)
    assert not node.admitted


def test_a_node_that_closes_leaves_nothing_behind(scene: Scene) -> None:
    node = scene.node("SASL_SSL")
    stranger = Stranger(scene)
    stranger.connect()
    assert len(node.admission) == 1
    node.do(node.admission.close)
    assert stranger.is_closed and len(node.admission) == 0
