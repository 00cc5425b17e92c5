"""A real Apache Kafka of one node, from Maven Central's jars, in a temporary directory.

The oracle of the interoperability tests and the yardstick of the benchmarks. It is KRaft's combined mode:
broker and controller in one JVM, so no ZooKeeper and no container. Run it by hand for a look at what Kafka
itself answers (it prints the address; Ctrl-C stops it and removes its data)::

    python -m benchmarks.apache_kafka
    PENSTOCK_TEST_BOOTSTRAP=127.0.0.1:PORT pytest tests/interop
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.java import KAFKA_VERSION, jars
from tests.tools import program

COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)
START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 30
NODE_ID = 1

_LOG4J = """Configuration:
  status: warn
  Appenders:
    Console:
      name: out
      PatternLayout: {pattern: "%d{HH:mm:ss.SSS} %p %c{1}: %m%n"}
  Loggers:
    Root:
      level: warn
      AppenderRef: {ref: out}
    Logger:
      - {name: kafka.server.KafkaRaftServer, level: info}
      - {name: org.apache.kafka.server.KafkaRaftServer, level: info}
"""


class ApacheKafka:
    """Started on entering the context; stopped, and its data removed, on leaving it."""

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, heap: str = "512m", protocol: str = "PLAINTEXT"
    ) -> None:
        """``protocol`` is that of the listener; SSL needs Kafka's settings for a keystore and a truststore."""
        self._settings = {
            "listener.security.protocol.map": f"{protocol}:{protocol},CONTROLLER:PLAINTEXT",
            "security.inter.broker.protocol": protocol,
            **(settings or {}),
        }
        self._protocol = protocol
        self._heap = heap
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path()
        self.bootstrap = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> Path:
        return self.directory / "output.log"

    def __enter__(self) -> ApacheKafka:
        class_path = os.pathsep.join(map(str, jars(*COORDINATES)))
        self.directory = Path(tempfile.mkdtemp(prefix="apache-kafka-"))
        try:
            self._start(class_path)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self, class_path: str) -> None:
        port, controller_port = _free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        properties = self.directory / "server.properties"
        listeners = f"{self._protocol}://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"
        properties.write_text(
            _properties(self.directory / "data", controller_port, {"listeners": listeners, **self._settings})
        )
        (self.directory / "log4j2.yaml").write_text(_LOG4J)
        java = [
            program("java"),
            f"-Xmx{self._heap}",
            f"-Xms{self._heap}",
            "-XX:+UseG1GC",
            f"-Dlog4j2.configurationFile={self.directory / 'log4j2.yaml'}",
            "-cp",
            class_path,
        ]
        formatting = [
            "kafka.tools.StorageTool",
            "format",
            "-t",
            "penstock-oracle-00000w",
            "-c",
            str(properties),
        ]
        with self.output.open("ab") as output:
            formatted = subprocess.run([*java, *formatting], stdout=output, stderr=output, check=False)
            if formatted.returncode:
                raise RuntimeError(f"cannot format its directory:\n{self.output.read_text()[-4000:]}")
            self._process = subprocess.Popen(
                [*java, "kafka.Kafka", str(properties)], stdout=output, stderr=output, start_new_session=True
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"Kafka Server started" not in self.output.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Apache Kafka did not start:\n{self.output.read_text()[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def _properties(data: Path, controller_port: int, settings: Mapping[str, str]) -> str:
    values = {
        "process.roles": "broker,controller",
        "node.id": str(NODE_ID),
        "controller.quorum.voters": f"{NODE_ID}@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(data),
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        **settings,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _free_ports(count: int) -> list[int]:
    """Ports free a moment ago: Kafka cannot say which port it was given, so it has to be told."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with ApacheKafka() as kafka:
        print(f"Apache Kafka {KAFKA_VERSION} ready kafka={kafka.bootstrap} log={kafka.output}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
