"""Certificates that change while a listener runs."""

from __future__ import annotations

import errno
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.tls.certificates import WARN_DAYS, Certificates
from penstock.tls.pem import Pem, TlsSettingsError
from penstock.tls.settings import TlsSettings
from tests.tls.authority import HOST, Authority
from tests.tls.party import Connected

DAY_MS = 24 * 3_600_000


class Keystore:
    """A file that is replaced, and what was reported of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[str] = []

    def write(self, text: str) -> None:
        """As good tools do it: a new file takes the place of the old one."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        temporary.chmod(0o600)
        os.replace(temporary, self.path)

    def load(self) -> Certificates:
        settings = TlsSettings.from_kafka({"ssl.keystore.location": str(self.path)})
        return Certificates(settings, report=self.reports.append)


@pytest.fixture
def keystore(authority: Authority, tmp_path: Path) -> Keystore:
    made = Keystore(tmp_path / "broker.pem")
    made.write("".join(authority.issue(HOST, is_host=True)))
    return made


def test_unchanged_files_are_not_loaded_again(keystore: Keystore) -> None:
    certificates = keystore.load()
    context = certificates.context
    assert not certificates.reload()
    assert certificates.context is context and keystore.reports == []


def test_new_connections_get_the_new_certificate(authority: Authority, keystore: Keystore) -> None:
    certificates = keystore.load()
    before = Connected(authority, broker=certificates.context).establish()
    keystore.write("".join(authority.issue(HOST, is_host=True, valid_days=100)))
    assert certificates.reload()
    after = Connected(authority, broker=certificates.context).establish()
    shown = [both.client.stream._engine.getpeercert(True) for both in (before, after)]
    assert shown[0] != shown[1]
    # The old connection goes on.
    before.broker.read()
    before.client.send(b"still here")
    before.turns.settle()
    assert before.broker.received == b"still here"


def test_change_of_equal_size_and_time_is_seen(authority: Authority, keystore: Keystore) -> None:
    certificates = keystore.load()
    status = keystore.path.stat()
    keystore.write(keystore.path.read_text())
    os.utime(keystore.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert certificates.reload(), "another file has taken its place"


def test_change_of_permissions_is_a_change_of_the_file(keystore: Keystore) -> None:
    """Nothing else changes when a file that the broker may not read is repaired."""
    pem = Pem("ssl.keystore.location", path=str(keystore.path))
    keystore.path.chmod(0o000)
    before = pem.version()
    assert pem.version() == before
    time.sleep(0.02)  # the clock of a file system is coarse
    keystore.path.chmod(0o600)
    assert pem.version() != before


def test_half_written_file_keeps_the_old_certificate_and_is_reported_once(
    authority: Authority, keystore: Keystore
) -> None:
    certificates = keystore.load()
    context = certificates.context
    text = "".join(authority.issue(HOST, is_host=True, valid_days=100))
    keystore.write(text[: len(text) // 2])
    for _ in range(3):
        assert not certificates.reload()
    assert certificates.context is context
    assert keystore.reports == [
        f"the changed certificates are not used: ssl.keystore.location {keystore.path}: not PEM, or cut off"
    ]
    keystore.write(text)
    assert certificates.reload()
    assert certificates.context is not context and len(keystore.reports) == 1


def test_each_bad_change_is_reported(keystore: Keystore) -> None:
    certificates = keystore.load()
    keystore.write("one")
    assert not certificates.reload()
    keystore.path.unlink()
    assert not certificates.reload() and not certificates.reload()
    assert [report.rpartition(": ")[2] for report in keystore.reports] == [
        "not PEM, or cut off",
        "No such file or directory",
    ]


@pytest.mark.parametrize("function", ["open", "os.memfd_create"])
def test_new_files_that_could_not_be_read_for_a_moment_are_used_later(
    authority: Authority, keystore: Keystore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    certificates = keystore.load()
    keystore.write("".join(authority.issue(HOST, is_host=True, valid_days=100)))

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(f"penstock.tls.pem.{function}", fails, raising=function != "open")
        assert not certificates.reload() and not certificates.reload()
    assert keystore.reports == [
        f"the changed certificates are not used: ssl.keystore.location {keystore.path}: Too many open files"
    ]
    assert certificates.reload() and not certificates.reload()
    assert len(keystore.reports) == 1


def test_failure_is_reported_again_after_good_files(authority: Authority, keystore: Keystore) -> None:
    certificates = keystore.load()
    for _ in range(2):
        keystore.write("nothing")
        assert not certificates.reload()
        keystore.write("".join(authority.issue(HOST, is_host=True)))
        assert certificates.reload()
    assert len(keystore.reports) == 2 and keystore.reports[0] == keystore.reports[1]


def test_failure_is_reported_again_after_the_old_files_were_back(
    keystore: Keystore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a network file system goes away and comes back."""
    certificates = keystore.load()

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("penstock.tls.pem.os.stat", fails)
            patch.setattr("penstock.tls.pem.open", fails, raising=False)
            assert not certificates.reload() and not certificates.reload()
        assert not certificates.reload(), "it is the file that is in use"
    assert len(keystore.reports) == 2 and keystore.reports[0] == keystore.reports[1]


def test_advice_about_a_bad_file_is_not_repeated(authority: Authority, keystore: Keystore) -> None:
    """The key is fine but readable by others, and the certificate is another one."""
    certificates = keystore.load()
    chain, _ = authority.issue(HOST, is_host=True)
    _, key = authority.issue("other")
    keystore.write(key + chain)
    keystore.path.chmod(0o644)
    for _ in range(3):
        assert not certificates.reload()
    (report,) = keystore.reports
    assert "the key does not belong" in report
    chain, key = authority.issue(HOST, is_host=True, valid_days=100)
    keystore.path.write_text(key + chain)
    assert certificates.reload() and not certificates.reload()
    assert len(keystore.reports) == 2 and "others on this machine may read the key" in keystore.reports[1]


@pytest.mark.parametrize(
    "error", [ValueError("strange"), OSError(errno.EIO, "strange"), ssl.SSLError("strange")]
)
def test_no_error_of_a_file_comes_out_of_a_reload(
    authority: Authority, keystore: Keystore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The owner calls it from a timer, and what a timer raises stops the broker."""
    certificates = keystore.load()
    keystore.write("".join(authority.issue(HOST, is_host=True, valid_days=100)))

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("penstock.tls.certificates.make_context", fails)
        assert not certificates.reload() and not certificates.reload()
    (report,) = keystore.reports
    assert report.startswith("the changed certificates are not used: ") and "strange" in report
    assert certificates.reload()


def test_key_and_certificate_replaced_one_after_the_other(authority: Authority, tmp_path: Path) -> None:
    chain_path, key_path = tmp_path / "c.pem", tmp_path / "k.pem"
    chain, key = authority.issue("alice")
    chain_path.write_text(chain)
    key_path.write_text(key)
    key_path.chmod(0o600)
    settings = TlsSettings.from_librdkafka(
        {
            "ssl.ca.pem": authority.pem,
            "ssl.certificate.location": str(chain_path),
            "ssl.key.location": str(key_path),
        }
    )
    reports: list[str] = []
    certificates = Certificates(settings, server_side=False, report=reports.append)
    context = certificates.context
    chain, key = authority.issue("bob")
    chain_path.write_text(chain)
    assert not certificates.reload() and certificates.context is context
    assert len(reports) == 1 and "the key does not belong to the first certificate" in reports[0]
    key_path.write_text(key)
    assert certificates.reload()
    broker = authority.broker(ssl_client_auth="required")
    both = Connected(authority, broker=broker, client=certificates.context).establish()
    assert both.broker.stream.peer_name == "CN=bob,OU=x,O=y"


def test_new_authorities_are_used(authority: Authority, other_authority: Authority, tmp_path: Path) -> None:
    """Replacing an authority: first both are trusted, then the new one alone."""
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(authority.pem)
    chain, key = authority.issue(HOST, is_host=True)
    settings = TlsSettings.from_kafka(
        {
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": key,
            "ssl.truststore.location": str(trusted),
            "ssl.client.auth": "required",
        }
    )
    certificates = Certificates(settings)
    old, new = authority.client("alice"), other_authority.client("alice", trusts=authority)
    accepted = []
    for text in (None, authority.pem + other_authority.pem, other_authority.pem):
        if text is not None:
            trusted.write_text(text)
            assert certificates.reload()
        for client in (old, new):
            both = Connected(authority, broker=certificates.context, client=client)
            both.broker.read()
            both.client.read()
            both.turns.settle()
            accepted.append(both.broker.stream.is_established)
    assert accepted == [True, False, True, True, False, True]


def resumes(broker: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None) -> bool:
    """Whether a handshake resumes this session."""
    to_broker, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_broker, server_hostname=HOST, session=session)
    far = broker.wrap_bio(to_broker, to_client, server_side=True)
    for _ in range(4):
        for end in (near, far):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert far.version() is not None
    return bool(far.session_reused)


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
def test_sessions_end_when_the_files_change(authority: Authority, keystore: Keystore, protocol: str) -> None:
    settings = TlsSettings.from_kafka(
        {"ssl.keystore.location": str(keystore.path), "ssl.enabled.protocols": protocol}
    )
    certificates = Certificates(settings)
    client = authority.client("alice")
    both = Connected(authority, broker=certificates.context, client=client).establish()
    both.turns.settle()
    session = both.client.stream._engine.session
    assert resumes(certificates.context, client, session) == (protocol == "TLSv1.2")
    keystore.write("".join(authority.issue(HOST, is_host=True, valid_days=100)))
    assert certificates.reload()
    assert not resumes(certificates.context, client, session)


def test_bad_files_at_the_start_are_an_error(keystore: Keystore) -> None:
    keystore.write("nothing")
    with pytest.raises(TlsSettingsError, match="not PEM"):
        keystore.load()


def test_expiry_is_warned_of(authority: Authority, keystore: Keystore) -> None:
    keystore.write("".join(authority.issue(HOST, is_host=True, valid_days=100)))
    certificates = keystore.load()
    # The end of the 100 days is rounded down to a second.
    now_ms = time.time_ns() // 1_000_000
    assert certificates.days_left(now_ms) == 99
    assert certificates.expiry_warning(now_ms) is None
    what = f"ssl.keystore.location {keystore.path}: the certificate"
    expires_ms = certificates.expires_ms
    assert expires_ms is not None
    for left_ms, warning in [
        (WARN_DAYS * DAY_MS, None),
        (WARN_DAYS * DAY_MS - 1, f"{what} expires in 29 days"),
        (DAY_MS, f"{what} expires in 1 day"),
        (DAY_MS - 1, f"{what} expires in 0 days"),
        (-1, f"{what} has expired"),
    ]:
        assert certificates.expiry_warning(expires_ms - left_ms) == warning


def test_client_without_certificate_has_no_expiry(authority: Authority) -> None:
    certificates = Certificates(TlsSettings.from_librdkafka({"ssl.ca.pem": authority.pem}), server_side=False)
    assert certificates.days_left(0) is None and certificates.expiry_warning(0) is None
    assert not certificates.reload()
