"""Commands on a cluster that has TLS only, and the file that says how to reach it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import client
from penstock.cli.connection import load_client_config
from penstock.cli.failures import WrongUsage
from tests.cli.conftest import Outcome, Penstock
from tests.cli.test_reference import COMMANDS
from tests.tls.authority import Authority
from tests.tls.broker import TlsBroker


def write(path: Path, values: dict[str, str]) -> str:
    path.write_text("# how to reach it\n\n" + "".join(f"{name} = {text}\n" for name, text in values.items()))
    return str(path)


@pytest.fixture
def config(tls_broker: TlsBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file for the listener without client certificates."""
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP", raising=False)
    values = {"bootstrap.servers": tls_broker.address(), **tls_broker.files.librdkafka()}
    return write(tmp_path / "client.properties", values)


def done(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome
    return outcome


def failed(outcome: Outcome, code: int = 1) -> str:
    """Its one line."""
    assert outcome.code == code and outcome.out == "", outcome
    assert outcome.err.startswith("penstock: ") and outcome.err.count("\n") == 1, outcome.err
    return outcome.err


# Commands


def test_topics_records_and_groups_over_tls(
    penstock: Penstock, config: str, unique: Callable[[str], str]
) -> None:
    topic, group = unique("topic"), unique("group")
    done(penstock("topics", "create", topic, "--partitions", "2", "--command-config", config))
    assert topic in done(penstock("topics", "list", "--config", config)).out
    done(penstock("produce", topic, "--config", config, stdin=b"one\ntwo\nthree\n"))
    words = ["consume", topic, "--no-follow", "--group", group, "--from", "beginning", "--config", config]
    assert sorted(done(penstock(*words)).out.split()) == ["one", "three", "two"]
    described = done(penstock("groups", "describe", group, "--config", config, "--json"))
    assert topic in described.out
    for secret in ("ca.pem", "ssl."):
        assert secret not in described.out


def test_commands_on_our_own_clients_work_over_tls(
    penstock: Penstock, config: str, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RawClient, and penstock.wire.
    assert tls_broker.address() in done(penstock("brokers", "list", "--config", config)).out
    monkeypatch.setenv("PENSTOCK_CONFIG", config)
    assert "transaction.version" in done(penstock("features", "list")).out
    done(penstock("transactions", "list"))
    done(penstock("topics", "cleaning"))


def test_a_client_certificate_may_be_inline(
    penstock: Penstock, tls_broker: TlsBroker, tmp_path: Path
) -> None:
    chain, key = tls_broker.files.authority.issue("alice")
    values = {
        "bootstrap.servers": tls_broker.address("MUTUAL"),
        "security.protocol": "SSL",
        # Newlines as spaces, as \n, and as continued lines.
        "ssl.ca.pem": " ".join(tls_broker.files.authority.pem.split("\n")),
        "ssl.certificate.pem": "\\n".join(chain.split("\n")),
        "ssl.key.pem": "\\\n".join(key.strip().split("\n")),
    }
    file = write(tmp_path / "alice.properties", values)
    done(penstock("topics", "list", "--config", file))
    done(penstock("transactions", "list", "--config", file))
    done(penstock("quorum", "show", "--config", file))


def test_every_command_that_reaches_brokers_takes_the_file() -> None:
    for words, command in COMMANDS.items():
        options = {option for each in command.params for option in each.opts}
        if "--bootstrap" in options:
            assert "--command-config" in options, words
            assert "--config" in options, words


# Which brokers


def test_the_command_line_wins_over_the_environment_and_bootstrap_over_the_file(
    penstock: Penstock, config: str, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "127.0.0.1:1"
    assert nowhere in failed(penstock("topics", "list", "--bootstrap", nowhere, "--config", config))
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", nowhere)
    done(penstock("topics", "list", "--config", config))
    monkeypatch.setenv("PENSTOCK_CONFIG", config)
    assert nowhere in failed(penstock("topics", "list"))
    done(penstock("topics", "list", "--bootstrap", tls_broker.address()))
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP")
    done(penstock("topics", "list"))


def test_topics_are_completed_over_tls(
    penstock: Penstock,
    config: str,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = unique("completed")
    done(penstock("topics", "create", topic, "--command-config", config))
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"penstock topics describe --config {config} completed")
    monkeypatch.setenv("COMP_CWORD", "5")
    assert topic in penstock().out.split()


# What goes wrong


OURS = [["topics", "list"], ["brokers", "list"], ["transactions", "list"]]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_wrong_authority_is_reported_at_once(
    penstock: Penstock, tls_broker: TlsBroker, tmp_path: Path, words: list[str]
) -> None:
    other = tmp_path / "other.pem"
    other.write_text(Authority().pem)
    values = {"security.protocol": "ssl", "ssl.ca.location": str(other)}
    file = write(tmp_path / "client.properties", values)
    line = failed(penstock(*words, "--bootstrap", tls_broker.address(), "--config", file))
    assert "authority that is not trusted here; set ssl.ca.location" in line


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_missing_client_certificate_is_named(
    penstock: Penstock, config: str, tls_broker: TlsBroker, words: list[str]
) -> None:
    line = failed(penstock(*words, "--bootstrap", tls_broker.address("MUTUAL"), "--config", config))
    assert "requires a certificate of the client; set ssl.certificate.location" in line


@pytest.mark.parametrize("words", OURS[:2], ids=" ".join)
def test_a_command_without_tls_is_told_about_the_file(
    penstock: Penstock, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 1.0)
    line = failed(penstock(*words, "--bootstrap", tls_broker.address()))
    assert "TLS" in line and "security.protocol=ssl" in line and "--config" in line


def test_tls_to_a_plaintext_port_is_said(penstock: Penstock, config: str, bootstrap: str) -> None:
    line = failed(penstock("topics", "list", "--bootstrap", bootstrap, "--config", config))
    assert bootstrap in line and "is it a plaintext listener?" in line


def test_the_option_of_topics_create_is_explained(penstock: Penstock, config: str) -> None:
    line = failed(penstock("topics", "create", "a", "--config", config), 2)
    assert f"pass the file as --command-config {config}" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ssl.ca.locatoin=x", "line 1: unknown setting ssl.ca.locatoin; did you mean ssl.ca.location?"),
        (
            "\nbootstrap.server=a:1",
            "line 2: unknown setting bootstrap.server; did you mean bootstrap.servers?",
        ),
        ("ssl.truststore.location=a", "line 1: ssl.truststore.location is a setting of Java's clients"),
        ("sasl.username=hunter2", "sasl.username needs security.protocol=sasl_ssl"),
        ("security.protocol=sasl_ssl", "sasl.mechanism is missing; use SCRAM-SHA-512"),
        ("security.protocol=tls", "security.protocol: not plaintext, ssl, sasl_plaintext or sasl_ssl: tls"),
        (
            "security.protocol=sasl_plaintext\nsasl.mechanism=PLAIN\nsasl.password=hunter2",
            "sasl.username is missing: PLAIN needs a user and a password",
        ),
        (
            'sasl.jaas.config=some.Module required username="a" password="hunter2";',
            "line 1: sasl.jaas.config is a setting of Java's clients; use sasl.username and sasl.password",
        ),
        (
            "ssl.key.password=hunter2",
            "security.protocol is missing; ssl.key.password needs security.protocol=ssl",
        ),
        ("hunter2", "line 1: not NAME=VALUE"),
        ("# a key\nssl.key.pem=-----BEGIN PRIVATE KEY-----\nhUnter2==", "line 3: not NAME=VALUE"),
        ("security.protocol=ssl\nssl.ca.pem=hunter2", "ssl.ca.pem: not PEM, or cut off"),
        ("security.protocol=ssl\nssl.ca.location=/none", "ssl.ca.location /none: No such file or directory"),
    ],
)
def test_a_bad_file_is_wrong_usage_and_shows_no_value(
    penstock: Penstock, tmp_path: Path, text: str, line: str
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(text)
    said = failed(penstock("topics", "list", "--config", str(file)), 2)
    assert line in said and str(file) in said
    assert not re.search("hunter2", said, re.IGNORECASE)


def test_a_file_that_cannot_be_read_is_named(penstock: Penstock, tmp_path: Path) -> None:
    assert "no-such-file: No such file" in failed(penstock("topics", "list", "--config", "no-such-file"), 2)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in failed(penstock("topics", "list", "--config", str(tmp_path / "binary")), 2)


def test_secrets_are_not_part_of_a_repr(tls_broker: TlsBroker, tmp_path: Path) -> None:
    values: dict[str, Any] = {**tls_broker.files.librdkafka("alice"), "ssl.key.password": "hunter2"}
    config = load_client_config(write(tmp_path / "client.properties", values))
    assert config.security["ssl.key.password"] == "hunter2"
    assert "hunter2" not in repr(config)


def test_a_name_that_is_checked_by_nobody_is_so_for_librdkafka_too(
    penstock: Penstock, tls_broker: TlsBroker, tmp_path: Path
) -> None:
    port = tls_broker.address().rpartition(":")[2]
    values = {"bootstrap.servers": f"localhost:{port}", **tls_broker.files.librdkafka()}
    file = tmp_path / "client.properties"
    line = failed(penstock("topics", "list", "--config", write(file, values)))
    assert "the broker's certificate is not for localhost" in line
    for value in ("none", ""):
        values["ssl.endpoint.identification.algorithm"] = value
        done(penstock("topics", "list", "--config", write(file, values)))


def test_plaintext_may_be_said_in_a_file(penstock: Penstock, bootstrap: str, tmp_path: Path) -> None:
    values = {"bootstrap.servers": bootstrap, "security.protocol": "plaintext"}
    done(penstock("topics", "list", "--config", write(tmp_path / "client.properties", values)))


def test_loading_raises_wrong_usage_only(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage):
        load_client_config(str(tmp_path))
