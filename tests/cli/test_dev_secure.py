"""`penstock dev --secure`: the files it makes, and a cluster that lets only its administrator in."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.connection import load_client_config
from penstock.cli.dev import make_plan
from penstock.cli.dev_security import DevSecurity
from penstock.cli.failures import Failure
from penstock.metadata import first_users
from tests.cli.conftest import Penstock

READY = "penstock dev ready bootstrap="


def test_the_files_are_private_and_the_password_is_random(tmp_path: Path) -> None:
    passwords = set()
    for name in ("one", "two"):
        security = DevSecurity(tmp_path / name, [1, 2, 3], [1])
        security.write_clients("127.0.0.1:9092")
        for file in (security.client_file, security.java_file, tmp_path / name / "tls" / "node1.pem"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        config = load_client_config(str(security.client_file))
        assert config.servers == "127.0.0.1:9092" and config.sasl is not None and config.context is not None
        assert config.sasl.user == "admin" and config.sasl.mechanism == "SCRAM-SHA-512"
        passwords.add(config.sasl.password)
        assert config.sasl.password in security.java_file.read_text()
        # Neither what nodes are given nor what is printed has it.
        shown = "".join([*security.settings(1, "127.0.0.1:9092"), *security.advice("a:1")])
        first = (tmp_path / name / "node-1" / first_users.FILE_NAME).read_text()
        assert config.sasl.password not in shown + first
        assert not (tmp_path / name / "node-2").exists()
    assert len(passwords) == 2


def test_every_node_has_a_certificate_of_its_own_and_knows_the_others(tmp_path: Path) -> None:
    security = DevSecurity(tmp_path, [1, 2], [1])
    one, two = security.settings(1, "127.0.0.1:1"), security.settings(2, "127.0.0.1:2")
    assert f"ssl.keystore.location={tmp_path}/tls/node1.pem" in one
    assert f"ssl.keystore.location={tmp_path}/tls/node2.pem" in two
    principals = "User:CN=node1,O=Penstock development;User:CN=node2,O=Penstock development"
    assert f"penstock.node.principals={principals}" in one and f"penstock.node.principals={principals}" in two
    assert {"super.users=User:admin", "listeners=SASL_SSL://127.0.0.1:1"} <= set(one)


def test_a_cluster_that_has_begun_keeps_its_password_and_may_grow(tmp_path: Path) -> None:
    DevSecurity(tmp_path, [1], [1]).write_clients("127.0.0.1:1")
    before = (tmp_path / "client.properties").read_text()
    (tmp_path / "node-1" / "meta.properties").touch()
    again = DevSecurity(tmp_path, [1, 2], [1])
    again.write_clients("127.0.0.1:1")
    assert (tmp_path / "client.properties").read_text() == before
    assert (tmp_path / "tls" / "node2.pem").exists()
    again.client_file.unlink()
    with pytest.raises(Failure, match="the password of the cluster's administrator"):
        DevSecurity(tmp_path, [1, 2], [1])


def test_a_run_that_was_killed_early_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "ca.key").write_text("half")
    DevSecurity(tmp_path, [1], [1]).write_clients("a:1")
    DevSecurity(tmp_path, [1], [1]).write_clients("a:1")
    assert load_client_config(str(tmp_path / "client.properties")).sasl is not None


def test_a_cluster_stays_secure_or_not(tmp_path: Path) -> None:
    make_plan(tmp_path / "plain", 1, 0)
    make_plan(tmp_path / "secure", 1, 0, is_secure=True)
    make_plan(tmp_path / "secure", 1, 0, is_secure=True)
    with pytest.raises(Failure, match="began without --secure"):
        make_plan(tmp_path / "plain", 1, 0, is_secure=True)
    with pytest.raises(Failure, match="began with --secure"):
        make_plan(tmp_path / "secure", 1, 0)


def test_paths_for_java_are_escaped(tmp_path: Path) -> None:
    security = DevSecurity(tmp_path / "\xe4\U0001f600\\x", [1], [1])
    security.write_clients("a:1")
    assert "\\u00e4\\ud83d\\ude00\\\\x/tls/ca.pem" in security.java_file.read_text()


def test_a_secure_cluster_lets_its_administrator_in_and_nobody_else(
    penstock: Penstock, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "penstock", "dev", "--secure", "--brokers", "1", "--port", "0"]
    with subprocess.Popen(
        [*command, "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "Python:" in line:
                    break
            else:
                pytest.fail("".join(lines))
            bootstrap = next(line for line in lines if line.startswith(READY)).removeprefix(READY).strip()
            config = tmp_path / "client.properties"
            for words in (["create", "t", "--command-config"], ["list", "--config"]):
                done = penstock("topics", *words, str(config))
                assert done.code == 0, done
            listed = penstock("users", "list", "--config", str(config))
            assert listed.code == 0 and "admin" in listed.out, listed
            wrong = tmp_path / "wrong.properties"
            password = load_client_config(str(config)).security["sasl.password"]
            wrong.write_text(config.read_text().replace(password, "wrong"))
            refused = penstock("topics", "list", "--config", str(wrong))
            assert refused.code == 1 and "did not accept user admin" in refused.err, refused
            assert penstock("topics", "list", "--bootstrap", bootstrap).code == 1
            # Another user has no rights yet.
            secret = tmp_path / "bob.password"
            secret.write_text("bob's")
            added = penstock("users", "add", "bob", "--password-file", str(secret), "--config", str(config))
            assert added.code == 0, added
            bob = config.read_text().replace(password, "bob's").replace("=admin", "=bob")
            wrong.write_text(bob)
            denied = penstock("topics", "create", "u", "--command-config", str(wrong))
            assert denied.code == 1 and "authoriz" in denied.err.lower(), denied
            assert password not in "".join(lines)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
