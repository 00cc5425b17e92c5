"""A cluster of processes whose nodes know each other by certificates."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from penstock.protocol.apis import APIS
from penstock.protocol.messages.quorum import VoteRequest
from penstock.protocol.requests import request_frame
from tests.cluster import wire
from tests.cluster.cluster import Cluster
from tests.cluster.failover import create
from tests.support import wait_until
from tests.tls.files import TlsFiles

TOPIC = "t"
VOTE = b"".join(request_frame(APIS[VoteRequest.KEY], 2, 1, b"", VoteRequest()))


@pytest.mark.timeout(180)
def test_nodes_with_certificates_are_a_cluster_that_nobody_else_can_speak_to(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    settings = {
        "listener.security.protocol.map": "INTERNAL:SSL",
        "penstock.node.principals": "User:CN=127.0.0.1,OU=x,O=y",
        **files.settings("none"),
    }
    with Cluster(3, settings) as cluster:
        create(cluster, TOPIC, 3)
        cluster.restart(2, kill=True)
        cluster.wait_in_sync(TOPIC)
        internal = cluster.nodes[1].host, cluster.nodes[1].internal_port
        # In plain text, without a certificate, and with the certificate of a client.
        for context in (None, files.authority.client(), files.authority.client("alice")):
            assert _ask(internal, context) == b""
        log = cluster.nodes[1].log
        for reason in ("does not speak TLS", "sent no certificate", "User:CN=alice,OU=x,O=y is not one of"):
            wait_until(lambda: reason in log(), 30, reason)  # noqa: B023
        known = wire.partitions(cluster.nodes[1].address, [TOPIC])
        assert all(view.error == 0 and len(view.in_sync_replicas) == 3 for view in known.values())


def _ask(address: tuple[str, int], context: ssl.SSLContext | None) -> bytes:
    """What a peer gets that sends a Vote: nothing, and the connection is closed."""
    connection = socket.create_connection(address, 30)
    try:
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname=address[0])
        connection.sendall(VOTE)
        return connection.recv(1)
    except OSError:
        return b""
    finally:
        connection.close()
