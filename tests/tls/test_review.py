"""Certificates that cannot be read for a moment, passwords, and names that are made to take long."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.tls.certificates import Certificates
from penstock.tls.pem import Pem, TlsSettingsError
from penstock.tls.principals import NoRuleMatches, PrincipalMapping
from penstock.tls.settings import TlsSettings, make_context
from tests.tls.authority import HOST, Authority


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    os.replace(new, path)


@pytest.mark.parametrize("where", ["open", "os.memfd_create"])
def test_new_files_that_could_not_be_read_for_a_moment_are_used_later(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Out of descriptors in a flood, or without the permission that chown or chmod gives a moment later."""
    keystore = tmp_path / "broker.pem"
    write(keystore, "".join(authority.issue(HOST, is_host=True)))
    reports: list[str] = []
    settings = TlsSettings.from_kafka({"ssl.keystore.location": str(keystore)})
    certificates = Certificates(settings, report=reports.append)
    write(keystore, "".join(authority.issue(HOST, is_host=True, valid_days=100)))

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(f"penstock.tls.pem.{where}", fails, raising=where != "open")
        assert not certificates.reload()
        assert not certificates.reload()
    assert len(reports) == 1
    assert certificates.reload()


def test_permissions_are_part_of_the_version_of_a_file(tmp_path: Path) -> None:
    """Whoever repairs a file that the broker may not read changes nothing else."""
    keystore = tmp_path / "broker.pem"
    keystore.write_text("any")
    keystore.chmod(0o000)
    pem = Pem("ssl.keystore.location", path=str(keystore))
    before = pem.version()
    time.sleep(0.02)
    keystore.chmod(0o600)
    assert pem.version() != before


def test_certificate_that_is_not_ascii_is_an_error_of_the_setting(authority: Authority) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    damaged = f"{chain[:90]}\N{LATIN SMALL LETTER E WITH ACUTE}{chain[91:]}"
    values = {"ssl.keystore.certificate.chain": damaged, "ssl.keystore.key": key}
    with pytest.raises(TlsSettingsError, match=r"ssl\.keystore\.certificate\.chain"):
        make_context(TlsSettings.from_kafka(values), True)


def test_password_that_openssl_cannot_take_is_an_error_of_the_setting(authority: Authority) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    encrypted = load_pem_private_key(key.encode(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"right")
    )
    settings = TlsSettings.from_kafka(
        {
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": encrypted.decode(),
            "ssl.key.password": "x" * 1025,
        }
    )
    with pytest.raises(TlsSettingsError, match=r"ssl\.key\.password"):
        make_context(settings, True)


def test_a_name_of_many_attributes_does_not_take_seconds_to_match() -> None:
    """The rule is the example in Kafka's documentation; the name has 732 characters. The loop waits for this."""
    rule = "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L"
    mapping = PrincipalMapping(rule)
    name = "CN=a" + ",OU=x" * 40 + ",O=x" * 40 + ",L=x" * 40 + ",ST=x" * 40
    began_s = time.process_time()
    with pytest.raises(NoRuleMatches):
        mapping.user(name)
    assert time.process_time() - began_s < 1.0
