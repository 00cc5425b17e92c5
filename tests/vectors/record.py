"""Records the golden vectors: a proxy between every client of the interoperability tests and Apache Kafka.

    python -m tests.vectors.record

It starts Kafka (from Maven Central's jars) with the proxy as its advertised address, so that clients stay on
the proxy; runs the interoperability tests of one client after the other through it; keeps one frame for each
API, version and direction; and rewrites ``tests/vectors/*.json``. It takes some minutes and is run by hand,
when a client or Kafka has a new version. The bytes change with every run (ids, timestamps); the set of
versions changes only with the clients.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from benchmarks.apache_kafka import ApacheKafka

from penstock.protocol.apis import APIS
from tests import java
from tests.interop.adapters.confluent import CLIENT_ID as CONFLUENT_ID
from tests.tools import KAFKAJS_PACKAGES, ROOT, kcat
from tests.vectors import HERE

# Of several frames that would do the largest below this is kept: it shows the most fields.
FRAME_BYTES_GOOD = 1200
RECEIVE_BYTES = 1 << 16


@dataclass(slots=True)
class Run:
    """One run of pytest, whose frames belong to one version of one client."""

    client: str
    arguments: tuple[str, ...]


@dataclass(slots=True)
class Recording:
    """Everything worth keeping so far: the best frame of each client for each place."""

    client: str = ""
    # (api key, version, direction) -> client -> frame
    frames: dict[tuple[int, int, str], dict[str, bytes]] = field(default_factory=lambda: defaultdict(dict))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, key: int, version: int, direction: str, client: str, frame: bytes) -> None:
        api = APIS.get(key)
        if api is None or not api.serves(version):
            return
        with self.lock:
            known = self.frames[key, version, direction]
            if client not in known or _worth(frame) > _worth(known[client]):
                known[client] = frame


class Proxy:
    """Passes bytes on unchanged, in both directions, and cuts a copy of them into frames."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self, target: str) -> None:
        threading.Thread(target=self._accept, args=(target,), daemon=True).start()

    def _accept(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        while True:
            client, _ = self._listener.accept()
            broker = socket.create_connection((host, int(port)))
            for each in (client, broker):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self._recording)
            for source, target_socket, seen in (
                (client, broker, connection.request),
                (broker, client, connection.response),
            ):
                threading.Thread(target=_pump, args=(source, target_socket, seen), daemon=True).start()


class Connection:
    """Knows which response answers which request: responses do not say what they are."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._asked: dict[int, tuple[int, int, str]] = {}  # by correlation id

    def request(self, frame: bytes) -> None:
        key, version, correlation_id, length = struct.unpack_from(">hhih", frame)
        if length < 0:
            return  # the tests' own raw fetch has no client id
        client_id = frame[10 : 10 + length].decode()
        # The reference client takes part in every client's tests.
        client = _confluent() if client_id == CONFLUENT_ID else self._recording.client
        self._asked[correlation_id] = key, version, client
        self._recording.keep(key, version, "request", client, frame)

    def response(self, frame: bytes) -> None:
        (correlation_id,) = struct.unpack_from(">i", frame)
        if correlation_id in self._asked:
            key, version, client = self._asked.pop(correlation_id)
            self._recording.keep(key, version, "response", client, frame)


def _pump(source: socket.socket, target: socket.socket, seen: object) -> None:
    assert callable(seen)
    pending = bytearray()
    try:
        while data := source.recv(RECEIVE_BYTES):
            pending += data
            while len(pending) >= 4:
                (size,) = struct.unpack_from(">i", pending)
                if len(pending) < 4 + size:
                    break
                # Before it is passed on, so that a request is known when its response arrives.
                seen(bytes(pending[4 : 4 + size]))
                del pending[: 4 + size]
            target.sendall(data)
    except OSError:
        pass  # either side went away
    for each in (source, target):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _worth(frame: bytes) -> int:
    """Larger is better up to a size; beyond it smaller is."""
    return len(frame) if len(frame) <= FRAME_BYTES_GOOD else FRAME_BYTES_GOOD - len(frame)


def _confluent() -> str:
    return f"confluent-kafka {importlib.metadata.version('confluent-kafka')}"


def _runs() -> list[Run]:
    told = subprocess.run([kcat(), "-V"], capture_output=True, text=True, check=True).stdout
    kcat_version = re.search(r"Version (\S+)", told)
    assert kcat_version is not None
    kafkajs = KAFKAJS_PACKAGES[0].replace("@", " ")
    runs = [
        Run(_confluent(), ("tests/interop/test_confluent.py",)),
        *(
            Run(f"{name} {importlib.metadata.version(name)}", (f"tests/interop/test_{stem}.py",))
            for name, stem in (("kafka-python", "kafka_python"), ("aiokafka", "aiokafka"))
        ),
        Run(f"kcat {kcat_version[1]}", ("tests/interop/test_kcat.py",)),
        Run(kafkajs, ("tests/interop/test_kafkajs.py",)),
        *(
            Run(f"kafka-clients {version}", ("tests/interop/test_java.py", "-k", version))
            for version in java.CLIENTS_VERSIONS
        ),
    ]
    modules = (ROOT / "tests/interop/go/go.mod").read_text()
    for name, stem in (("github.com/twmb/franz-go", "franz_go"), ("github.com/IBM/sarama", "sarama")):
        version = re.search(rf"{re.escape(name)} v(\S+)", modules)
        assert version is not None
        runs.append(Run(f"{stem.replace('_', '-')} {version[1]}", (f"tests/interop/test_{stem}.py",)))
    return runs


def _choose(recording: Recording) -> dict[int, list[dict[str, str | int]]]:
    """One frame for each place, from the client that is least represented; places with no choice first."""
    used: Counter[str] = Counter()
    chosen: dict[int, list[dict[str, str | int]]] = defaultdict(list)
    places = sorted(recording.frames.items(), key=lambda place: (len(place[1]), place[0]))
    for (key, version, direction), frames in places:
        client = min(frames, key=lambda each: (used[each], -_worth(frames[each])))
        used[client] += 1
        chosen[key].append(
            {"version": version, "direction": direction, "client": client, "bytes": frames[client].hex()}
        )
    return chosen


def _write(recording: Recording) -> None:
    for old in HERE.glob("*.json"):
        old.unlink()
    for key, frames in _choose(recording).items():
        api = APIS[key]
        lines = ",\n".join("  " + json.dumps(each) for each in sorted(frames, key=_order))
        head = json.dumps({"api_key": key, "name": api.name, "broker": f"Apache Kafka {java.KAFKA_VERSION}"})
        path = HERE / f"{key:02d}_{api.name}.json"
        path.write_text(f'{head[:-1]}, "frames": [\n{lines}\n]}}\n')
    size = sum(path.stat().st_size for path in HERE.glob("*.json"))
    print(
        f"{sum(map(len, recording.frames.values()))} frames seen, {len(recording.frames)} kept, {size} bytes"
    )


def _order(frame: dict[str, str | int]) -> tuple[int, str]:
    return int(frame["version"]), str(frame["direction"])


def main() -> None:
    recording = Recording()
    proxy = Proxy(recording)
    with ApacheKafka({"advertised.listeners": f"PLAINTEXT://{proxy.address}"}) as kafka:
        proxy.start(kafka.bootstrap)
        for run in _runs():
            recording.client = run.client
            print(f"--- {run.client}", flush=True)
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *run.arguments],
                cwd=ROOT,
                env={**os.environ, "PENSTOCK_TEST_BOOTSTRAP": proxy.address},
                check=True,
            )
    _write(recording)


if __name__ == "__main__":
    main()
