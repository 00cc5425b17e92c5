"""Kafka Connect's distributed worker as a process, and its REST interface."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import java
from tests.interop.application import Application
from tests.interop.client import PATIENCE_S
from tests.interop.transactions import JVM
from tests.support import wait_until

# Connect says much at INFO, and where its REST interface listens.
LOGGING = "org.slf4j:slf4j-simple:1.7.36"
# How long a worker may take until its connectors work, on a machine that does other things too.
STARTING_S = 6 * PATIENCE_S
LISTENS = re.compile(r"REST server listening at (http://127\.0\.0\.1:\d+)/")


def class_path() -> str:
    """Connect, the connectors between files and topics, and MirrorMaker."""
    artifacts = ("connect-runtime", "connect-file", "connect-mirror")
    coordinates = [f"org.apache.kafka:{artifact}:{java.KAFKA_VERSION}" for artifact in artifacts]
    return java.classpath(*coordinates, LOGGING)


def java_application(
    main: str, properties: Mapping[str, str], directory: Path, *arguments: str
) -> Application:
    """One of Connect's programs, which read their settings from a file."""
    file = directory / "settings.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    # Libraries that a killed process leaves behind go with the directory.
    scratch = f"-Djava.io.tmpdir={directory}"
    words = ["java", *JVM, scratch, "-cp", class_path(), main, str(file), *arguments]
    return Application(words, directory / "log")


class Worker:
    """A distributed worker with its three topics. Entering ``run()`` starts it."""

    def __init__(self, bootstrap: str, group: str, directory: Path, settings: Mapping[str, str]) -> None:
        self.config_topic, self.offset_topic, self.status_topic = (
            f"{group}-{kind}" for kind in ("configs", "offsets", "status")
        )
        self._directory = directory
        self._properties = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "listeners": "http://127.0.0.1:0",
            "config.storage.topic": self.config_topic,
            "offset.storage.topic": self.offset_topic,
            "status.storage.topic": self.status_topic,
            **{f"{kind}.storage.replication.factor": "1" for kind in ("config", "offset", "status")},
            "offset.storage.partitions": "2",
            "status.storage.partitions": "1",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "offset.flush.interval.ms": "50",
            # What a killed worker leaves behind, a member and transactions, is to be gone soon: with exactly-once
            # support it reads its topics to their ends, past transactions that are open.
            "producer.transaction.timeout.ms": "5000",
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "500",
            "scheduled.rebalance.max.delay.ms": "0",
            "plugin.discovery": "service_load",
            **settings,
        }

    def run(self) -> Application:
        # Its address of last time.
        (self._directory / "log").unlink(missing_ok=True)
        return java_application(
            "org.apache.kafka.connect.cli.ConnectDistributed", self._properties, self._directory
        )

    def wait_until_ready(self, running: Application) -> None:
        """It answers once it has read its topics and joined its group."""

        def answers() -> bool:
            assert running.is_running, running.log_tail()
            try:
                self.get("/connectors")
            except (AssertionError, OSError):
                return False
            return True

        wait_until(answers, STARTING_S, "the worker answers")

    @property
    def url(self) -> str:
        found = LISTENS.search((self._directory / "log").read_text())
        assert found is not None, "it does not listen yet"
        return found[1]

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def put(self, path: str, body: Any) -> Any:
        return self._call("PUT", path, body)

    def delete(self, path: str) -> None:
        self._call("DELETE", path)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Raises OSError, which HTTPError is one of."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def wait_for_states(self, connector: str, states: list[str]) -> None:
        wait_until(
            lambda: self.states(connector) == states, STARTING_S, f"{connector} and its tasks are {states}"
        )

    def states(self, connector: str) -> list[str]:
        """Of the connector and of its tasks; empty if it is not known."""
        try:
            status = self.get(f"/connectors/{connector}/status")
        except urllib.error.HTTPError as error:
            assert error.code in (404, 409, 500), error
            error.close()
            return []
        return [status["connector"]["state"], *(task["state"] for task in status["tasks"])]
