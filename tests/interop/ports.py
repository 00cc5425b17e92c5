"""A broker with a listener of each kind, and clients on each of them that get in."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from penstock.sasl.scram import ScramClient
from tests.cluster.wire import Wire
from tests.interop.client import PATIENCE_S
from tests.interop.test_sasl import PASSWORD, client_settings, put
from tests.interop.test_tls import address
from tests.support import BrokerProcess, wait_until
from tests.tls.files import TlsFiles

LISTENERS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISM = "SCRAM-SHA-256"
SETTINGS = {
    "listeners": ",".join(f"{name}://127.0.0.1:0" for name in LISTENERS),
    "sasl.enabled.mechanisms": MECHANISM,
    "group.initial.rebalance.delay.ms": "0",
}
HELLO = ApiVersionsRequest(client_software_name="a", client_software_version="1")


@dataclass(frozen=True, slots=True)
class Ports:
    process: BrokerProcess
    files: TlsFiles

    @property
    def pid(self) -> int:
        return self.process.pid

    def context(self, listener: str) -> ssl.SSLContext | None:
        """None on listeners without TLS."""
        return self.files.authority.client() if listener.endswith("SSL") else None

    def connect(self, listener: str) -> Wire:
        """A client that has not authenticated yet, where it has to. Raises NoAnswer."""
        return Wire(self.process.addresses[listener], timeout_s=PATIENCE_S, context=self.context(listener))

    def log_in(self, listener: str) -> Wire:
        """A client that may send any request. Raises NoAnswer."""
        wire = self.connect(listener)
        if listener.startswith("SASL"):
            try:
                authenticate(wire)
            except BaseException:
                wire.close()
                raise
        return wire

    def librdkafka(self, listener: str) -> dict[str, str]:
        """The settings of a client."""
        if listener.startswith("SASL"):
            return client_settings(self.process, self.files, MECHANISM, listener=listener)
        found = {"bootstrap.servers": address(self.process, listener)}
        return found if listener == "PLAINTEXT" else {**found, **self.files.librdkafka()}


@contextmanager
def ports(
    files: TlsFiles, settings: Mapping[str, str] | None = None, kind: type[BrokerProcess] = BrokerProcess
) -> Iterator[Ports]:
    with kind({**SETTINGS, **(settings or {}), **files.settings("none")}) as process:
        put(process, "alice")
        yield Ports(process, files)


def authenticate(wire: Wire) -> None:
    exchange = ScramClient(MECHANISM, "alice", PASSWORD, b"client-nonce-of-24-bytes")
    wire.call(SaslHandshakeRequest(mechanism=MECHANISM), 1)
    challenge = wire.call(SaslAuthenticateRequest(auth_bytes=exchange.first()), 2)
    proof = exchange.reply(challenge.auth_bytes)
    exchange.finish(wire.call(SaslAuthenticateRequest(auth_bytes=proof), 2).auth_bytes)


class SteadyClient:
    """Produces to a topic and consumes from it, in a thread. Leaving the context fails if it ever met an error."""

    def __init__(self, settings: dict[str, str], topic: str) -> None:
        self._topic = topic
        self.errors: list[str] = []
        self.delivered = 0
        self.consumed = 0
        heard: dict[str, Any] = {**settings, "error_cb": lambda error: self.errors.append(str(error))}
        self._producer = Producer({**heard, "linger.ms": 0})
        self._consumer = Consumer({**heard, "group.id": topic, "enable.auto.commit": False})
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> SteadyClient:
        self._producer.produce(self._topic, b"first", on_delivery=self._acknowledged)
        self._producer.flush(PATIENCE_S)
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait_for_more()
        finally:
            self._is_done.set()
            self._thread.join()
            self._producer.flush(PATIENCE_S)
            self._consumer.close()
            del self._producer
        assert error is not None or self.errors == []

    def wait_for_more(self) -> None:
        """It is served now."""
        before = self.delivered
        wait_until(
            lambda: self.errors or self.consumed > before + 3,
            PATIENCE_S,
            "another client produces and consumes",
        )

    def _acknowledged(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.delivered += 1
        else:
            self.errors.append(str(error))

    def _work(self) -> None:
        while not self._is_done.is_set():
            self._producer.produce(self._topic, b"x" * 100, on_delivery=self._acknowledged)
            self._producer.poll(0)
            for record in self._consumer.consume(100, 0.02):
                if record.error() is None:
                    self.consumed += 1
                else:
                    self.errors.append(str(record.error()))
