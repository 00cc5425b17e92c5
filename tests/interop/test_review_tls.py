"""A listener that is bound to a name: the broker's certificate is for that name, not for its address."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.interop.client import PATIENCE_S
from tests.support import BrokerProcess
from tests.tls.files import TlsFiles


def test_clients_are_given_the_name_that_a_listener_is_bound_to(tmp_path: Path) -> None:
    """As in Kafka. With the number that the name resolves to, they do not accept the certificate."""
    files = TlsFiles(tmp_path, host="localhost")
    settings = {
        "listeners": "TLS://localhost:0",
        "listener.security.protocol.map": "TLS:SSL",
        **files.settings("none"),
    }
    with BrokerProcess(settings) as broker:
        _, port = broker.addresses["TLS"]
        admin = AdminClient({"bootstrap.servers": f"localhost:{port}", **files.librdkafka()})
        found = admin.list_topics(timeout=PATIENCE_S)
        assert [(each.host, each.port) for each in found.brokers.values()] == [("localhost", port)]
