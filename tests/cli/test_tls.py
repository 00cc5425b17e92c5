"""`penstock tls`: the files it makes, and a broker and clients that use them."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from penstock.cli import certificates
from penstock.tls.settings import TlsSettings, make_context
from tests.cli.conftest import Outcome, Penstock
from tests.support import BrokerProcess


def failed(outcome: Outcome, code: int) -> str:
    assert outcome.code == code and outcome.out == "", outcome
    assert outcome.err.startswith("penstock: ") and outcome.err.count("\n") == 1, outcome.err
    return outcome.err


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def hosts(file: Path) -> set[str]:
    names = certificate(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in names}


def test_a_broker_and_clients_use_the_files(penstock: Penstock, tmp_path: Path) -> None:
    made = penstock("tls", "init", str(tmp_path / "certs"), "--json").json
    alice = penstock("tls", "client", str(tmp_path / "certs"), "alice", "--json").json
    settings = {"listeners": "SSL://127.0.0.1:0", "ssl.client.auth": "required", **made["broker_settings"]}
    with BrokerProcess(settings) as broker:
        port = broker.addresses["SSL"][1]
        for host in ("127.0.0.1", "localhost"):
            admin = AdminClient({"bootstrap.servers": f"{host}:{port}", **alice["client_settings"]})
            assert list(admin.list_topics(timeout=10).brokers) == [1]
        file = tmp_path / "client.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in alice["client_settings"].items()))
        listed = penstock("topics", "list", "--config", str(file), "--bootstrap", f"localhost:{port}")
        assert listed.code == 0, listed
        # Without a certificate of its own, the client is asked for one.
        file.write_text("".join(f"{name}={value}\n" for name, value in made["client_settings"].items()))
        line = failed(
            penstock("topics", "list", "--config", str(file), "--bootstrap", f"localhost:{port}"), 1
        )
        assert "requires a certificate of the client" in line


def test_keys_are_private_and_other_files_are_not(penstock: Penstock, tmp_path: Path) -> None:
    assert penstock("tls", "init", str(tmp_path), "--nodes", "2").code == 0
    assert penstock("tls", "client", str(tmp_path), "alice").code == 0
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    private = dict.fromkeys(("ca.key", "node1.pem", "node2.pem", "alice.pem"), 0o600)
    assert modes == {**private, "ca.pem": 0o644}
    assert "PRIVATE KEY" not in (tmp_path / "ca.pem").read_text()


def test_certificates_are_for_the_hosts_that_were_given(penstock: Penstock, tmp_path: Path) -> None:
    given = [
        "--host",
        "b1.example.com",
        "--host",
        "10.0.0.1",
        "--host",
        "[2001:db8::1]",
        "--host",
        "*.example.org",
    ]
    assert penstock("tls", "init", str(tmp_path), *given).code == 0
    assert hosts(tmp_path / "node1.pem") == {"b1.example.com", "10.0.0.1", "2001:db8::1", "*.example.org"}
    assert penstock("tls", "node", str(tmp_path), "b2").code == 0
    assert hosts(tmp_path / "b2.pem") >= {"localhost", "127.0.0.1", "::1"}


def test_only_a_node_may_be_a_server(penstock: Penstock, tmp_path: Path) -> None:
    penstock("tls", "init", str(tmp_path))
    penstock("tls", "client", str(tmp_path), "alice")

    def connect(server: str) -> None:
        trusted = {"ssl.truststore.location": str(tmp_path / "ca.pem")}
        keystore = {"ssl.keystore.location": str(tmp_path / f"{server}.pem")}
        context = make_context(TlsSettings.from_kafka({**trusted, **keystore}), True)
        options = {
            "ssl.ca.location": str(tmp_path / "ca.pem"),
            "ssl.endpoint.identification.algorithm": "none",
        }
        client = make_context(TlsSettings.from_librdkafka(options), False)
        ends = [ssl.MemoryBIO() for _ in range(2)]
        pair = [context.wrap_bio(ends[0], ends[1], True), client.wrap_bio(ends[1], ends[0], False)]
        for _ in range(4):
            for each in reversed(pair):
                try:
                    each.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    connect("node1")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        connect("alice")
    usage = (
        certificate(tmp_path / "alice.pem").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    )
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_certificates_are_valid_for_as_long_as_asked(penstock: Penstock, tmp_path: Path) -> None:
    made = penstock("tls", "init", str(tmp_path), "--days", "4000", "--json").json
    now = datetime.now(UTC)
    node, authority = certificate(tmp_path / "node1.pem"), certificate(tmp_path / "ca.pem")
    assert timedelta(days=3999) < node.not_valid_after_utc - now <= timedelta(days=4000)
    assert node.not_valid_before_utc < now < node.not_valid_after_utc < authority.not_valid_after_utc
    assert made["certificates"][0]["expires"] == node.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ")
    line = failed(penstock("tls", "client", str(tmp_path), "alice", "--days", "5000"), 2)
    assert "--days 5000: the authority itself is valid for only 400" in line
    assert not (tmp_path / "alice.pem").exists()


def test_no_file_is_overwritten_and_a_refusal_writes_none(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "node2.pem").write_text("mine")
    line = failed(penstock("tls", "init", str(tmp_path), "--nodes", "2"), 1)
    assert f"{tmp_path}/node2.pem exists already; nothing is overwritten" in line
    assert [each.name for each in tmp_path.iterdir()] == ["node2.pem"]
    assert penstock("tls", "init", str(tmp_path)).code == 0
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for words in (["init"], ["client", "node1"], ["node", "node2"]):
        failed(penstock("tls", words[0], str(tmp_path), *words[1:]), 1)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["client", "DIR", "ca"], "ca.pem is the authority's own file"),
        (["client", "DIR", "../alice"], "not a name of letters"),
        (["client", "DIR", ""], "not a name of letters"),
        (["node", "DIR", "n", "--host", "b1:9092"], "--host b1:9092: not a host name or an IP address"),
        (["node", "DIR", "n", "--host", "0.0.0.0"], "--host 0.0.0.0: nobody connects to this address"),
        (["init", "DIR/other", "--host", "b\xfc.de"], "not a host name or an IP address"),
        (["init", "DIR/other", "--days", "0"], "--days"),
        (["client", "DIR/other", "alice"], "make an authority with `penstock tls init"),
    ],
)
def test_what_cannot_be_in_a_certificate_is_wrong_usage(
    penstock: Penstock, tmp_path: Path, words: list[str], line: str
) -> None:
    assert penstock("tls", "init", str(tmp_path), "--nodes", "0").code == 0
    said = failed(penstock("tls", *(word.replace("DIR", str(tmp_path)) for word in words)), 2)
    assert line in said
    assert {each.name for each in tmp_path.iterdir()} == {"ca.pem", "ca.key"}


def test_an_authority_that_cannot_sign_is_refused(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for each in (one, other):
        penstock("tls", "init", str(each), "--nodes", "0")
    (one / "ca.key").write_bytes((other / "ca.key").read_bytes())
    assert "ca.key is not the key of" in failed(penstock("tls", "client", str(one), "alice"), 2)
    (one / "ca.key").write_text("nothing")
    assert "is not a private key" in failed(penstock("tls", "client", str(one), "alice"), 2)
    (one / "ca.pem").write_text("nothing")
    assert "is not a certificate" in failed(penstock("tls", "client", str(one), "alice"), 2)
    penstock("tls", "init", str(tmp_path / "node"))
    node = (tmp_path / "node" / "node1.pem").read_bytes()
    for name in ("ca.pem", "ca.key"):
        (other / name).write_bytes(node)
    assert "was not made by `penstock tls init`" in failed(penstock("tls", "client", str(other), "alice"), 2)
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", -2)
    monkeypatch.setattr(certificates, "EARLY", timedelta(days=5))
    certificates.DevelopmentAuthority.create(tmp_path, days=-3)
    assert "has expired" in failed(penstock("tls", "client", str(tmp_path), "alice"), 2)


def test_what_is_printed_says_how_to_use_it(penstock: Penstock, tmp_path: Path) -> None:
    said = penstock("tls", "init", str(tmp_path)).out
    for line in (
        f'"ssl.keystore.location" = "{tmp_path}/node1.pem"',
        "security.protocol=ssl",
        f"ssl.ca.location={tmp_path}/ca.pem",
        "ssl.truststore.type=PEM",
    ):
        assert line in said
    alice = penstock("tls", "client", str(tmp_path), "alice")
    assert "User:CN=alice,O=Penstock development" in alice.out
    assert f"ssl.key.location={tmp_path}/alice.pem" in alice.out
    assert "PRIVATE" not in said + alice.out
