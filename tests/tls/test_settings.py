"""The ``ssl.*`` settings, in Kafka's and in librdkafka's spelling."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.tls import pem
from penstock.tls.certificates import Certificates
from penstock.tls.pem import TlsSettingsError
from penstock.tls.settings import SECRET_NAMES, ClientAuth, TlsSettings, make_context
from tests.tls.authority import HOST, Authority
from tests.tls.party import Connected


def write(path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def keystore(authority: Authority, tmp_path: Path) -> str:
    chain, key = authority.issue(HOST, is_host=True)
    return write(tmp_path / "broker.pem", key + chain)


@pytest.fixture
def truststore(authority: Authority, tmp_path: Path) -> str:
    return write(tmp_path / "authority.pem", authority.pem)


def test_one_file_has_key_and_chain(authority: Authority, keystore: str) -> None:
    settings = TlsSettings.from_kafka({"ssl.keystore.type": "PEM", "ssl.keystore.location": keystore})
    Connected(authority, broker=make_context(settings, True)).establish()


def test_order_and_comments_in_the_file_do_not_matter(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    path = write(tmp_path / "b.pem", f"Bag Attributes\r\n  friendlyName: x\r\n{chain}\nthe key:\n{key}")
    Connected(
        authority, broker=make_context(TlsSettings.from_kafka({"ssl.keystore.location": path}), True)
    ).establish()


def test_inline_text_may_have_lost_its_newlines(authority: Authority) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    settings = TlsSettings.from_kafka(
        {
            "ssl.keystore.certificate.chain": chain.replace("\n", " "),
            "ssl.keystore.key": key.replace("\n", " "),
        }
    )
    Connected(authority, broker=make_context(settings, True)).establish()


def test_librdkafka_names_are_for_clients(authority: Authority, truststore: str, tmp_path: Path) -> None:
    chain, key = authority.issue("alice")
    settings = TlsSettings.from_librdkafka(
        {
            "ssl.ca.location": truststore,
            "ssl.certificate.location": write(tmp_path / "alice.pem", chain),
            "ssl.key.location": write(tmp_path / "alice.key", key),
        }
    )
    both = Connected(
        authority,
        broker=authority.broker(ssl_client_auth="required"),
        client=make_context(settings, False),
    ).establish()
    assert both.broker.stream.peer_name == "CN=alice,OU=x,O=y"


def test_kafka_names_are_also_for_clients(authority: Authority, truststore: str) -> None:
    settings = TlsSettings.from_kafka({"ssl.truststore.location": truststore})
    Connected(authority, client=make_context(settings, False)).establish()


def test_client_may_trust_everybody_if_told_so(authority: Authority, other_authority: Authority) -> None:
    client = other_authority.client(enable_ssl_certificate_verification="false")
    Connected(authority, client=client, hostname="other.test").establish()


def test_client_trusts_the_system_by_default() -> None:
    context = make_context(TlsSettings.from_librdkafka({}), False)
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


def test_only_new_versions_and_no_renegotiation(authority: Authority) -> None:
    for context in (authority.broker(), authority.client()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.maximum_version is ssl.TLSVersion.TLSv1_3
        assert context.options & ssl.OP_NO_RENEGOTIATION
        assert context.options & ssl.OP_NO_COMPRESSION


@pytest.mark.parametrize(
    ("enabled", "newest", "expected"),
    [
        ("", "", ("TLSv1.2", "TLSv1.3")),
        ("TLSv1.3", "", ("TLSv1.3",)),
        ("TLSv1.3, TLSv1.2", "TLSv1.3", ("TLSv1.2", "TLSv1.3")),
        ("TLSv1.2", "TLSv1.2", ("TLSv1.2",)),
        ("", "TLSv1.2", ("TLSv1.2",)),
        ("TLSv1.2,TLSv1.3", "TLS", ("TLSv1.2", "TLSv1.3")),
    ],
)
def test_protocols(enabled: str, newest: str, expected: tuple[str, ...]) -> None:
    settings = TlsSettings.from_kafka({"ssl.enabled.protocols": enabled, "ssl.protocol": newest})
    assert settings.protocols == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("", "none"), ("Required", "required"), ("requested ", "requested")]
)
def test_client_auth(text: str, expected: str) -> None:
    assert TlsSettings.from_kafka({"ssl.client.auth": text}).client_auth is ClientAuth(expected)


def test_suites_in_javas_spelling(authority: Authority) -> None:
    suites = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"
    both = Connected(authority, broker=authority.broker(ssl_cipher_suites=suites)).establish()
    # None of TLS 1.3 is listed, so it is not used.
    cipher = both.broker.stream._engine.cipher()
    assert cipher is not None and cipher[:2] == ("ECDHE-ECDSA-AES128-GCM-SHA256", "TLSv1.2")


def test_suites_of_tls_1_3_alone_leave_no_tls_1_2(authority: Authority) -> None:
    assert (
        authority.broker(ssl_cipher_suites="TLS_AES_256_GCM_SHA384").minimum_version is ssl.TLSVersion.TLSv1_3
    )


def test_choice_among_suites_of_tls_1_3_is_warned_of(authority: Authority) -> None:
    settings = TlsSettings.from_kafka({"ssl.cipher.suites": "TLS_AES_256_GCM_SHA384"})
    lines: list[str] = []
    make_context(settings, False, warn=lines.append)
    assert lines == ["ssl.cipher.suites: TLS 1.3 is used with all of its suites, not only the listed ones"]


def test_key_that_others_can_read_is_warned_of(keystore: str) -> None:
    settings = TlsSettings.from_kafka({"ssl.keystore.location": keystore})
    lines: list[str] = []
    make_context(settings, True, warn=lines.append)
    assert lines == []
    os.chmod(keystore, 0o644)
    make_context(settings, True, warn=lines.append)
    assert lines == [
        f"ssl.keystore.location {keystore}: others on this machine may read the key; chmod 600 {keystore}"
    ]


@pytest.mark.parametrize("kind", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_encrypted_key_needs_its_password(authority: Authority, tmp_path: Path, kind: PrivateFormat) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    encrypted = (
        load_pem_private_key(key.encode(), None)
        .private_bytes(Encoding.PEM, kind, BestAvailableEncryption(b"secret1"))
        .decode()
    )
    assert "ENCRYPTED" in encrypted
    path = write(tmp_path / "b.pem", encrypted + chain)
    values = {"ssl.keystore.location": path}
    with pytest.raises(TlsSettingsError) as raised:
        make_context(TlsSettings.from_kafka(values), True)
    assert str(raised.value) == (
        f"ssl.keystore.location {path}: the key is encrypted, and ssl.key.password is not set"
    )
    with pytest.raises(TlsSettingsError) as raised:
        make_context(TlsSettings.from_kafka(values | {"ssl.key.password": "wrong-one"}), True)
    assert (
        str(raised.value)
        == f"ssl.keystore.location {path}: the key cannot be decrypted with ssl.key.password"
    )
    context = make_context(TlsSettings.from_kafka(values | {"ssl.key.password": "secret1"}), True)
    Connected(authority, broker=context).establish()


def encrypted_settings(authority: Authority, password: str) -> TlsSettings:
    """With a key that this password does not decrypt."""
    chain, key = authority.issue(HOST, is_host=True)
    encrypted = load_pem_private_key(key.encode(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"right")
    )
    return TlsSettings.from_kafka(
        {
            "ssl.keystore.certificate.chain": chain,
            "ssl.keystore.key": encrypted.decode(),
            "ssl.key.password": password,
        }
    )


@pytest.mark.parametrize(
    ("password", "error"),
    [
        ("x" * 1024, "ssl.keystore.key: the key cannot be decrypted with ssl.key.password"),
        ("x" * 1025, "ssl.key.password: longer than 1024 bytes"),
        ("é" * 513, "ssl.key.password: longer than 1024 bytes"),
        ("\udcff", "ssl.key.password: not UTF-8"),
    ],
)
def test_password_that_openssl_cannot_take_is_one_line(
    authority: Authority, password: str, error: str
) -> None:
    with pytest.raises(TlsSettingsError) as raised:
        make_context(encrypted_settings(authority, password), True)
    assert str(raised.value) == error


def test_error_of_the_machine_is_not_blamed_on_the_password(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", fails)
    with pytest.raises(TlsSettingsError) as raised:
        make_context(encrypted_settings(authority, "wrong"), True)
    assert str(raised.value) == "ssl.keystore.key: Too many open files"


def test_inline_key_leaves_no_file(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    modes: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def watch(context: ssl.SSLContext, path: str, **named: str) -> None:
        modes.append(os.stat(path).st_mode & 0o777)
        load(context, path, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watch)
    Connected(authority, broker=authority.broker()).establish()
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left_open(authority: Authority) -> None:
    authority.broker()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    authority.broker()
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            {"ssl.keystore.type": "JKS", "ssl.keystore.location": "/etc/k/broker.jks"},
            "ssl.keystore.type=JKS is not supported, use PEM. Convert it: keytool -importkeystore -srckeystore "
            "/etc/k/broker.jks -destkeystore broker.p12 -deststoretype PKCS12 && openssl pkcs12 -in broker.p12 "
            "-out broker.pem",
        ),
        (
            {"ssl.truststore.type": "pkcs12", "ssl.truststore.location": "/etc/k/trust.p12"},
            "ssl.truststore.type=PKCS12 is not supported, use PEM. Convert it: openssl pkcs12 -in /etc/k/trust.p12 "
            "-out trust.pem",
        ),
        ({"ssl.keystore.type": "BKS"}, "ssl.keystore.type: not a supported type: BKS. Use PEM."),
        (
            {"ssl.keystore.location": "x", "ssl.keystore.key": "y"},
            "ssl.keystore.location and ssl.keystore.certificate.chain or ssl.keystore.key: set one or the other",
        ),
        (
            {"ssl.keystore.certificate.chain": "x"},
            "ssl.keystore.key is missing: a certificate and its key are set together",
        ),
        (
            {"ssl.keystore.key": "x"},
            "ssl.keystore.certificate.chain is missing: a certificate and its key are set together",
        ),
        (
            {"ssl.truststore.location": "x", "ssl.truststore.certificates": "y"},
            "ssl.truststore.location and ssl.truststore.certificates: set one or the other",
        ),
        ({"ssl.client.auth": "maybe"}, "ssl.client.auth: not none, requested or required: maybe"),
        (
            {"ssl.enabled.protocols": "TLSv1.1,TLSv1.2"},
            "ssl.enabled.protocols: not TLSv1.2 or TLSv1.3: TLSv1.1",
        ),
        ({"ssl.protocol": "SSLv3"}, "ssl.protocol: not TLSv1.2 or TLSv1.3: SSLv3"),
        (
            {"ssl.enabled.protocols": "TLSv1.3", "ssl.protocol": "TLSv1.2"},
            "ssl.protocol=TLSv1.2 leaves none of ssl.enabled.protocols",
        ),
        (
            {"ssl.endpoint.identification.algorithm": "ldaps"},
            "ssl.endpoint.identification.algorithm: not https or empty: ldaps",
        ),
    ],
)
def test_wrong_settings_are_one_line(values: dict[str, str], error: str) -> None:
    with pytest.raises(TlsSettingsError) as raised:
        TlsSettings.from_kafka(values)
    assert str(raised.value) == error


@pytest.mark.parametrize("store", ["keystore", "truststore"])
def test_password_of_a_store_is_refused_and_not_shown(store: str) -> None:
    with pytest.raises(TlsSettingsError) as raised:
        TlsSettings.from_kafka({f"ssl.{store}.password": "hunter2"})
    assert "hunter2" not in str(raised.value) and f"ssl.{store}.password" in str(raised.value)


def test_wrong_settings_of_clients_are_one_line() -> None:
    for values, error in [
        (
            {"ssl.certificate.location": "x"},
            "ssl.key.location is missing: a certificate and its key are set together",
        ),
        ({"ssl.ca.location": "x", "ssl.ca.pem": "y"}, "ssl.ca.location and ssl.ca.pem: set one or the other"),
        (
            {"enable.ssl.certificate.verification": "no"},
            "enable.ssl.certificate.verification: not true or false",
        ),
        (
            {"ssl.endpoint.identification.algorithm": "x"},
            "ssl.endpoint.identification.algorithm: not https or none: x",
        ),
    ]:
        with pytest.raises(TlsSettingsError) as raised:
            TlsSettings.from_librdkafka(values)
        assert str(raised.value) == error


def error_of(path: str) -> str:
    with pytest.raises(TlsSettingsError) as raised:
        make_context(TlsSettings.from_kafka({"ssl.keystore.location": path}), True)
    text = str(raised.value)
    assert "\n" not in text
    return text.removeprefix(f"ssl.keystore.location {path}: ")


def test_wrong_files_are_one_line(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    _, other_key = authority.issue("other")
    path = tmp_path / "b.pem"
    assert error_of(str(path)) == "No such file or directory"
    assert error_of(str(tmp_path)) == "Is a directory"
    for content, error in [
        (b"", "not PEM, or cut off"),
        (b"hello", "not PEM, or cut off"),
        ((key + chain[:-30]).encode(), "not PEM, or cut off"),
        (key.encode(), "no certificate in it"),
        (chain.encode(), "0 private keys in it instead of one"),
        ((key + other_key + chain).encode(), "2 private keys in it instead of one"),
        ((key + chain.replace("MII", "M#I")).encode(), "a certificate in it is damaged"),
        ((key + chain.replace("MII", "MéI")).encode(), "a certificate in it is damaged"),
        (key.encode() + chain.encode().replace(b"MII", b"M\xffI"), "a certificate in it is damaged"),
        (key.encode().replace(b"MH", b"M\xff") + chain.encode(), "the private key in it is damaged"),
        (
            (other_key + chain).encode(),
            f"the key does not belong to the first certificate of ssl.keystore.location {path}",
        ),
        (bytes(pem.PEM_BYTES_MAX + 1), "larger than 4194304 bytes, so not PEM"),
    ]:
        write(path, content)
        assert error_of(str(path)) == error
    write(path, b"\xfe\xed\xfe\xed\0\0\0\2")
    assert error_of(str(path)).startswith("a Java keystore. Convert it: keytool ")
    write(path, b"\x30\x82\x01\x02")
    assert error_of(str(path)).startswith("binary, not PEM. If it is PKCS12: Convert it: openssl pkcs12 ")


def test_damaged_key_is_one_line_without_the_key(authority: Authority, tmp_path: Path) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    body = key.splitlines()[1]
    path = write(tmp_path / "b.pem", key.replace(body, body[:20] + body[24:]) + chain)
    text = error_of(path)
    assert text and all(line not in text for line in key.splitlines())


def test_listener_needs_a_certificate(authority: Authority) -> None:
    with pytest.raises(TlsSettingsError, match=r"^ssl\.keystore\.location is missing"):
        make_context(TlsSettings(), True)


@pytest.mark.parametrize("client_auth", ["required", "requested"])
def test_client_auth_needs_authorities(keystore: str, client_auth: str) -> None:
    settings = TlsSettings.from_kafka({"ssl.keystore.location": keystore, "ssl.client.auth": client_auth})
    with pytest.raises(TlsSettingsError, match=r"^ssl\.truststore\.location is missing"):
        make_context(settings, True)


def test_unknown_suite_is_one_line() -> None:
    for suite in ("TLS_RSA_WITH_NULL_MD5", "nonsense"):
        settings = TlsSettings.from_kafka({"ssl.cipher.suites": suite})
        with pytest.raises(TlsSettingsError) as raised:
            make_context(settings, False)
        assert str(raised.value) == f"ssl.cipher.suites: unknown or too weak: {suite}"


def test_secrets_are_not_shown(authority: Authority) -> None:
    chain, key = authority.issue(HOST, is_host=True)
    settings = TlsSettings.from_kafka(
        {"ssl.keystore.certificate.chain": chain, "ssl.keystore.key": key, "ssl.key.password": "hunter2"}
    )
    assert settings.key is not None
    shown = repr(settings) + str(settings.key) + repr(settings.key.key())
    assert "hunter2" not in shown
    assert all(line not in shown for line in key.splitlines())
    assert {"ssl.keystore.key", "ssl.key.password", "ssl.key.pem"} <= set(SECRET_NAMES)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("ssl.keystore.location", "PEM"),
        ("ssl.keystore.location", "JKS"),
        ("ssl.truststore.location", "PEM"),
        ("ssl.truststore.location", "PKCS12"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", " "])
def test_key_in_the_place_of_a_path_is_not_shown(
    authority: Authority, setting: str, kind: str, newline: str
) -> None:
    _, key = authority.issue(HOST, is_host=True)
    values = {setting: key.replace("\n", newline), setting.replace("location", "type"): kind}
    with pytest.raises(TlsSettingsError) as raised:
        TlsSettings.from_kafka(values)
    assert str(raised.value) == f"{setting}: the path of a file is expected here, not PEM text"


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_path_that_no_file_can_have_is_one_line(path: str) -> None:
    with pytest.raises(TlsSettingsError) as raised:
        Certificates(TlsSettings.from_kafka({"ssl.keystore.location": path}))
    assert str(raised.value) == "ssl.keystore.location: not the path of a file"
