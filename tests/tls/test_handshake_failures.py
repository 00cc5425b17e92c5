"""Handshakes that fail: a line for the log, an alert for the peer, and nothing left behind."""

from __future__ import annotations

import ssl
import struct
import warnings

import pytest

from penstock.tls.stream import TlsStream
from tests.tls.authority import HOST, Authority
from tests.tls.memory import Turns, memory_pair
from tests.tls.party import Connected, Party

NOT_TLS = "the peer does not speak TLS; it may be configured for a plaintext listener"


def failed(both: Connected) -> Connected:
    both.broker.read()
    both.client.read()
    both.turns.settle()
    assert both.broker.inner.is_closed or both.client.inner.is_closed
    assert both.broker.received == both.client.received == b""
    for party in (both.broker, both.client):
        assert all("\n" not in str(error) and "_ssl.c" not in str(error) for error in party.errors)
    return both


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", f"{NOT_TLS} (it sent HTTP)"),
        (b"POST /topics HTTP/1.1\r\n\r\n", f"{NOT_TLS} (it sent HTTP)"),
        # ApiVersions, as a Kafka client begins.
        (struct.pack(">ihhih", 14, 18, 3, 1, 4) + b"test", NOT_TLS),
        # Metadata with a large frame.
        (struct.pack(">ihhih", 1 << 20, 3, 9, 1, 4) + b"test" + bytes(5_000), NOT_TLS),
        (b"SSH-2.0-OpenSSH_9.6\r\n", NOT_TLS),
        (bytes(1_000), NOT_TLS),
        (b"\xff" * 1_000, NOT_TLS),
    ],
)
def test_plaintext_on_a_tls_port_is_an_error(authority: Authority, sent: bytes, error: str) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    broker = Party(turns, far, authority.broker(), server_side=True)
    broker.read()
    near.send([sent])
    turns.settle()
    assert broker.error == error
    assert far.is_closed and turns.timers == 0


def test_tls_to_a_plaintext_port_is_an_error_for_the_client(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    client = Party(turns, near, authority.client(), server_side=False, hostname="broker.test")
    client.read()
    turns.turn()
    far.send([struct.pack(">ii", 4, 1)])
    turns.settle()
    assert client.error == NOT_TLS


def test_client_does_not_trust_an_unknown_authority(authority: Authority, other_authority: Authority) -> None:
    both = failed(Connected(authority, client=other_authority.client()))
    assert both.client.error == (
        "the peer's certificate is not accepted: unable to get local issuer certificate"
    )
    assert both.broker.error == "the peer refused our certificate: it does not trust its authority"


def test_client_refuses_a_certificate_for_another_host(authority: Authority) -> None:
    both = failed(Connected(authority, hostname="other.test"))
    assert "Hostname mismatch" in both.client.error and "other.test" in both.client.error
    assert both.broker.error == "the peer refused our certificate"


def test_client_refuses_a_certificate_without_alternative_names(authority: Authority) -> None:
    both = failed(Connected(authority, broker=authority.broker(is_host=False)))
    assert "Hostname mismatch" in both.client.error and HOST in both.client.error
    assert both.broker.error == "the peer refused our certificate"


def test_name_of_the_host_is_not_checked_when_switched_off(authority: Authority) -> None:
    client = authority.client(ssl_endpoint_identification_algorithm="none")
    Connected(authority, client=client, hostname="other.test").establish()


def test_client_refuses_an_expired_certificate(authority: Authority) -> None:
    both = failed(Connected(authority, broker=authority.broker(valid_days=-1)))
    assert both.client.error == "the peer's certificate is not accepted: certificate has expired"
    assert both.broker.error == "the peer refused our certificate: it has expired"


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
def test_missing_client_certificate_is_an_error_where_required(authority: Authority, protocol: str) -> None:
    broker = authority.broker(ssl_client_auth="required", ssl_enabled_protocols=protocol)
    both = failed(Connected(authority, broker=broker))
    assert both.broker.error == "the client sent no certificate, and ssl.client.auth is required"
    assert not both.broker.established
    if protocol == "TLSv1.3":
        assert both.client.error == "the broker requires a client certificate"


@pytest.mark.parametrize("client_auth", ["required", "requested"])
def test_client_certificate_of_an_unknown_authority_is_refused(
    authority: Authority, other_authority: Authority, client_auth: str
) -> None:
    client = other_authority.client("alice", trusts=authority)
    both = failed(Connected(authority, broker=authority.broker(ssl_client_auth=client_auth), client=client))
    assert both.broker.error.startswith("the peer's certificate is not accepted: ")
    assert not both.broker.established and both.broker.stream.peer_name is None


def test_expired_client_certificate_is_refused(authority: Authority) -> None:
    client = authority.client("alice", valid_days=-1)
    both = failed(Connected(authority, broker=authority.broker(ssl_client_auth="required"), client=client))
    assert both.broker.error == "the peer's certificate is not accepted: certificate has expired"


def test_old_version_of_tls_is_refused(authority: Authority) -> None:
    client = authority.client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    client.set_ciphers("ALL:@SECLEVEL=0")
    both = failed(Connected(authority, client=client))
    assert both.broker.error == "the peer offers no version of TLS that is enabled here"
    assert both.client.error == "the peer supports none of our versions of TLS"


def test_versions_without_overlap_are_an_error(authority: Authority) -> None:
    client = authority.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    both = failed(
        Connected(authority, broker=authority.broker(ssl_enabled_protocols="TLSv1.3"), client=client)
    )
    assert both.broker.error == "the peer offers no version of TLS that is enabled here"


def test_suites_without_overlap_are_an_error(authority: Authority) -> None:
    client = authority.client(ssl_cipher_suites="ECDHE-ECDSA-AES128-GCM-SHA256")
    broker = authority.broker(ssl_cipher_suites="TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384")
    both = failed(Connected(authority, broker=broker, client=client))
    assert both.broker.error == "the peer offers no cipher suite that is enabled here"


@pytest.mark.parametrize("hello_bytes", [0, 1, 5, 100])
def test_peer_that_falls_silent_costs_nothing(authority: Authority, hello_bytes: int) -> None:
    both = Connected(authority)
    both.client.inner.send_bytes_max = hello_bytes
    both.turns.turn()
    both.client.inner.send_bytes_max = 0
    both.broker.read()
    both.turns.settle()
    assert not both.broker.errors and not both.broker.stream.is_established
    assert both.broker.stream.recv_into(memoryview(bytearray(10))) is None
    both.broker.stream.close()
    assert both.broker.inner.is_closed and both.turns.timers == 0


def test_peer_that_leaves_during_the_handshake_is_an_error(authority: Authority) -> None:
    both = Connected(authority)
    both.broker.read()
    both.turns.turn()
    both.client.inner.close()
    both.turns.settle()
    assert both.broker.error in (
        "the peer closed the connection during the TLS handshake",
        "[Errno 104] the connection is gone",
    )


def test_error_waits_for_an_owner_that_only_writes(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    broker = Party(turns, far, authority.broker(), server_side=True)
    near.send([b"GET / HTTP/1.1\r\n\r\n"])
    turns.settle()
    assert not broker.errors
    broker.send(b"x")
    assert broker.error == f"{NOT_TLS} (it sent HTTP)"


def test_error_is_announced_to_an_owner_that_waits_to_write(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    broker = Party(turns, far, authority.broker(), server_side=True)
    broker.send(b"x")
    near.send([b"GET / HTTP/1.1\r\n\r\n"])
    turns.settle()
    assert broker.error == f"{NOT_TLS} (it sent HTTP)"


def test_error_is_raised_by_every_later_call(authority: Authority) -> None:
    turns = Turns()
    far, near = memory_pair(turns)
    stream = TlsStream(far, authority.broker(), turns, server_side=True)
    near.send([b"GET / HTTP/1.1\r\n\r\n"])
    turns.settle()
    for _ in range(2):
        with pytest.raises(OSError, match="does not speak TLS"):
            stream.recv_into(memoryview(bytearray(10)))
        with pytest.raises(OSError, match="does not speak TLS"):
            stream.send([b"x"])


def test_handshake_without_end_is_an_error(authority: Authority) -> None:
    """A ClientHello may be 16 MB long by its own account, in records of one byte."""
    turns = Turns()
    far, near = memory_pair(turns)
    broker = Party(turns, far, authority.broker(), server_side=True)
    broker.read()
    hello = b"\x01\xff\xff\xff" + bytes(100_000)
    near.send([b"".join(b"\x16\x03\x01\x00\x01" + hello[i : i + 1] for i in range(len(hello)))])
    turns.settle()
    assert broker.errors and far.received_bytes < 300_000
