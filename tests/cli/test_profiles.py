"""Profiles, the security settings in the environment, and which of all that wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import client
from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure
from penstock.cli.profile_file import is_secret, profiles_path
from tests.cli.conftest import Outcome, Penstock
from tests.tls.authority import Authority
from tests.tls.broker import TlsBroker

PROFILES = """
[prod]
bootstrap.servers = "prod:9093"
security.protocol = "ssl"
ssl.ca.location = "prod-ca.pem"
"ssl.key.password" = "hunter2"

[dev]
"bootstrap.servers" = "dev:9092"

[unsafe]
bootstrap.servers = "unsafe:9093"
security.protocol = "ssl"
enable.ssl.certificate.verification = false
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of profiles, in a directory with the certificates that it names."""
    for name in ("PENSTOCK_BOOTSTRAP", "PENSTOCK_CONFIG", "PENSTOCK_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "penstock" / "profiles.toml"
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text(PROFILES)
    authority = Authority().pem
    for name in ("prod-ca.pem", "other-ca.pem"):
        (file.parent / name).write_text(authority)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return file


@pytest.fixture
def chosen(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Brokers]:
    """What a command would connect to."""
    seen: list[Brokers] = []

    def connect(bootstrap: Brokers) -> Any:
        seen.append(bootstrap)
        raise Failure("seen")

    monkeypatch.setattr(client, "connect", connect)

    def run(*words: str) -> Brokers:
        at = words.index("--") if "--" in words else len(words)
        outcome = penstock(*words[:at], "topics", "list", *words[at + 1 :])
        assert outcome.err == "penstock: seen\n", outcome
        return seen[-1]

    return run


def failed(outcome: Outcome) -> str:
    assert outcome.code == 2 and outcome.out == "", outcome
    assert outcome.err.startswith("penstock: ") and outcome.err.count("\n") == 1, outcome.err
    assert "hunter2" not in outcome.err
    return outcome.err


# Profiles


def test_a_profile_says_where_and_how(chosen: Callable[..., Brokers], file: Path) -> None:
    prod = chosen("--profile", "prod")
    assert prod.servers == "prod:9093" and prod.context is not None
    # Relative to the file of profiles.
    assert prod.security["ssl.ca.location"] == str(file.parent / "prod-ca.pem")
    assert prod.security["ssl.key.password"] == "hunter2"
    assert "hunter2" not in repr(prod) + str(prod)
    dev = chosen("--profile", "dev")
    assert dev.servers == "dev:9092" and dev.context is None and dev.security == {}
    assert chosen("--profile", "unsafe").security["enable.ssl.certificate.verification"] == "false"
    assert chosen().servers == "127.0.0.1:9092"


def test_a_command_runs_with_a_profile(
    penstock: Penstock, file: Path, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"bootstrap.servers": tls_broker.address("MUTUAL"), **tls_broker.files.librdkafka("alice")}
    file.write_text("[tls]\n" + "".join(f'"{name}" = "{value}"\n' for name, value in values.items()))
    listed = penstock("--profile", "tls", "topics", "list")
    assert listed.code == 0 and listed.err == "", listed
    monkeypatch.setenv("PENSTOCK_PROFILE", "tls")
    assert penstock("quorum", "show").code == 0


def test_a_command_runs_with_the_environment_alone(
    penstock: Penstock, file: Path, tls_broker: TlsBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", tls_broker.address("MUTUAL"))
    for name, value in tls_broker.files.librdkafka("alice").items():
        monkeypatch.setenv(f"PENSTOCK_{name.upper().replace('.', '_')}", value)
    assert penstock("topics", "list").code == 0
    assert penstock("transactions", "list").code == 0


# What wins


def test_the_command_line_wins_over_the_environment_and_that_over_a_profile(
    chosen: Callable[..., Brokers], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "client.properties"
    config.write_text("bootstrap.servers=file:9092\n")
    monkeypatch.setenv("PENSTOCK_PROFILE", "prod")
    assert chosen().servers == "prod:9093"
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", "environment:9092")
    environment = chosen()
    assert environment.servers == "environment:9092" and environment.context is not None
    # A profile on the command line is as strong as everything else there.
    dev = chosen("--profile", "dev")
    assert dev.servers == "dev:9092" and dev.context is None
    assert chosen("--", "--bootstrap", "line:9092").servers == "line:9092"
    assert chosen("--profile", "dev", "--", "--bootstrap", "line:9092").servers == "line:9092"
    # A file and a profile do not mix: this one has no security.
    from_file = chosen("--", "--config", str(config))
    assert from_file.servers == "file:9092" and from_file.context is None
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    assert chosen("--profile", "dev").servers == "dev:9092"


def test_the_environment_changes_single_settings_of_a_profile(
    chosen: Callable[..., Brokers], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PROFILE", "prod")
    monkeypatch.setenv("PENSTOCK_SSL_KEY_PASSWORD", "other")
    monkeypatch.setenv("PENSTOCK_SSL_CA_PEM", Authority().pem.replace("\n", "\\n"))
    brokers = chosen()
    assert brokers.security["ssl.key.password"] == "other"
    # One or the other: the profile's file is not used beside it.
    assert "ssl.ca.pem" in brokers.security and "ssl.ca.location" not in brokers.security
    # Chosen on the command line, the profile wins, and the environment adds what it leaves out.
    monkeypatch.setenv("PENSTOCK_SSL_CIPHER_SUITES", "ECDHE-ECDSA-AES256-GCM-SHA384")
    brokers = chosen("--profile", "prod")
    assert brokers.security["ssl.key.password"] == "hunter2"
    assert "ssl.ca.pem" not in brokers.security
    assert brokers.security["ssl.cipher.suites"] == "ECDHE-ECDSA-AES256-GCM-SHA384"


def test_a_password_may_be_in_the_environment_alone(
    chosen: Callable[..., Brokers], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "[sasl]\nsecurity.protocol = 'sasl_plaintext'\nsasl.mechanism = 'SCRAM-SHA-512'\nsasl.username = 'alice'\n"
        "[tls]\nsecurity.protocol = 'ssl'\n"
    )
    monkeypatch.setenv("PENSTOCK_SASL_PASSWORD", "hunter2")
    for words in (["--profile", "sasl"], []):
        monkeypatch.setenv("PENSTOCK_PROFILE", "sasl")
        brokers = chosen(*words)
        assert brokers.sasl is not None and (brokers.sasl.user, brokers.sasl.password) == ("alice", "hunter2")
        assert brokers.security["sasl.password"] == "hunter2"
    # It is not sent to a cluster that asks for none.
    tls = chosen("--profile", "tls")
    assert tls.sasl is None and "sasl.password" not in tls.security


def test_a_user_that_the_protocol_does_not_use_is_refused(penstock: Penstock, file: Path) -> None:
    file.write_text("[p]\nsecurity.protocol = 'ssl'\nsasl.password = 'hunter2'\n")
    assert "sasl.password needs security.protocol=sasl_ssl" in failed(
        penstock("--profile", "p", "topics", "list")
    )


def test_tls_in_the_environment_is_never_left_out(
    chosen: Callable[..., Brokers], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECURITY_PROTOCOL", "ssl")
    assert chosen("--", "--bootstrap", "line:9092").context is not None
    assert chosen("--profile", "dev").context is not None


def test_an_empty_variable_is_none(
    chosen: Callable[..., Brokers], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PENSTOCK_SECURITY_PROTOCOL",
        "PENSTOCK_PROFILE",
        "PENSTOCK_PROFILES",
        "PENSTOCK_SSL_CA_PEM",
    ):
        monkeypatch.setenv(name, "")
    assert chosen().context is None


# What goes wrong


def test_a_file_and_a_profile_together_are_refused(
    penstock: Penstock, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "client.properties"
    config.write_text("bootstrap.servers=file:9092\n")
    line = failed(penstock("--profile", "dev", "topics", "list", "--config", str(config)))
    assert "--config and --profile both say how to connect" in line
    monkeypatch.setenv("PENSTOCK_PROFILE", "dev")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    assert "PENSTOCK_CONFIG and PENSTOCK_PROFILE both" in failed(penstock("topics", "list"))


def test_a_profile_that_is_not_there_is_named(penstock: Penstock, file: Path) -> None:
    line = failed(penstock("--profile", "pord", "topics", "list"))
    assert f"no profile pord in {file}, did you mean prod?" in line
    file.unlink()
    assert f"no profile prod: {file} has none" in failed(penstock("--profile", "prod", "topics", "list"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[p]\nbootstrap.server = 'a:1'", "did you mean bootstrap.servers?"),
        ("[p]\nssl.truststore.location = 'a'", "is a setting of Java's clients"),
        ("[p]\nsecurity.protocol = ['ssl']", "security.protocol is not a text"),
        ("[p]\nssl.key.password = 'hunter2'", "security.protocol is missing"),
        ("[p]\n'ssl.ca.pem' = 'a'\nssl.ca.pem = 'b'", "ssl.ca.pem is there twice"),
        ("[p]\nsecurity.protocol = 'ssl'\nssl.ca.location = '/none'", "/none: No such file or directory"),
        ("bootstrap.servers = 'a:1'", "bootstrap is outside of a profile"),
        ("[p]\nssl.key.password = hunter2", "is not a TOML file: Invalid value (at line 2"),
        ("[p]\n\xff", "is not a TOML file"),
    ],
)
def test_a_bad_file_is_wrong_usage_and_shows_no_value(
    penstock: Penstock, file: Path, text: str, line: str
) -> None:
    file.write_bytes(text.encode("latin-1"))
    said = failed(penstock("--profile", "p", "topics", "list"))
    assert line in said and str(file) in said


def test_an_unknown_variable_is_named(
    penstock: Penstock, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SECURITY_PROTOCOLL", "ssl")
    line = failed(penstock("topics", "list"))
    assert "PENSTOCK_SECURITY_PROTOCOLL; did you mean PENSTOCK_SECURITY_PROTOCOL?" in line


def test_a_bad_variable_shows_no_value(
    penstock: Penstock, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SSL_KEY_PASSWORD", "hunter2")
    assert "PENSTOCK_* in the environment: security.protocol is missing" in failed(penstock("topics", "list"))


def test_secrets_that_others_may_read_are_warned_of(penstock: Penstock, file: Path) -> None:
    assert penstock("profiles", "list").err == ""
    file.chmod(0o644)
    outcome = penstock("profiles", "list")
    assert outcome.code == 0
    assert outcome.err == (
        f"penstock: warning: others on this machine may read the secrets in {file}; chmod 600 {file}\n"
    )
    file.write_text("[dev]\nbootstrap.servers = 'dev:9092'\n")
    assert penstock("profiles", "list").err == ""


def test_a_profile_in_the_wrong_place_is_explained(penstock: Penstock, file: Path) -> None:
    assert "write --profile NAME before the command" in failed(
        penstock("topics", "list", "--profile", "prod")
    )
    assert "a broker has no profile" in failed(penstock("--profile", "prod", "serve", "--config", "a.toml"))


# The commands


def test_profiles_are_listed_and_shown_without_secrets(
    penstock: Penstock, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert penstock("profiles").rows == [
        ["PROFILE", "BROKERS", "PROTOCOL"],
        ["prod", "prod:9093", "ssl"],
        ["dev", "dev:9092", "plaintext"],
        ["unsafe", "unsafe:9093", "ssl"],
    ]
    listed = penstock("profiles", "list", "--json").json
    assert listed["file"] == str(file) and [each["name"] for each in listed["profiles"]] == [
        "prod",
        "dev",
        "unsafe",
    ]
    shown = penstock("profiles", "show", "prod", "--json")
    assert shown.json["settings"]["ssl.key.password"] == "(hidden)" and "hunter2" not in shown.out
    assert "hunter2" not in penstock("profiles", "show", "prod").out
    assert penstock("--profile", "dev", "profiles", "show").rows[1] == ["bootstrap.servers", "dev:9092"]
    assert "which profile?" in failed(penstock("profiles", "show"))
    file.unlink()
    assert penstock("profiles", "list", "--json").json == {"file": str(file), "profiles": []}


@pytest.mark.parametrize(
    "name", ["sasl.password", "ssl.key.pem", "ssl.key.password", "sasl.oauthbearer.client.secret"]
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)
    assert not is_secret("sasl.username") and not is_secret("ssl.key.location")


def test_the_file_is_where_xdg_says_or_where_the_environment_says() -> None:
    assert profiles_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/penstock/profiles.toml")
    default = Path("~/.config/penstock/profiles.toml").expanduser()
    assert profiles_path({}) == default == profiles_path({"XDG_CONFIG_HOME": "relative"})
    assert profiles_path({"PENSTOCK_PROFILES": "/p.toml", "XDG_CONFIG_HOME": "/x"}) == Path("/p.toml")


def test_profiles_are_completed(penstock: Penstock, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "penstock --profile pr")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert penstock().out.split() == ["prod"]
