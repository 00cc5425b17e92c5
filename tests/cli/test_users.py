"""`penstock users`: with a broker, with passwords from every place, and before there is a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.metadata import first_users
from penstock.metadata.security import ScramMechanism
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsResponse,
)
from penstock.sasl import scram
from tests.cli.conftest import Penstock
from tests.cli.fake_broker import FakeBroker

Unique = Callable[[str], str]
SECRET = "a secret, with = and żółć"


class TestWithABroker:
    def test_a_user_is_added_changed_and_removed(self, kafka: Penstock, unique: Unique) -> None:
        user = unique("user")
        added = kafka("users", "add", user, "--password-stdin", stdin=f"{SECRET}\n".encode())
        assert added.out == f"added user {user} (SCRAM-SHA-512, 8192 iterations)\n"
        assert kafka("users", "list", user).rows == [
            ["USER", "MECHANISM", "ITERATIONS"],
            [user, "SCRAM-SHA-512", "8192"],
        ]
        words = ("--iterations", "4096", "--password-stdin", "--json")
        changed = kafka("users", "password", user, *words, stdin=b"other").json
        assert changed == {"user": user, "mechanisms": ["SCRAM-SHA-512"], "iterations": 4096}
        listed = kafka("users", "list", "--json").json["users"]
        assert {"user": user, "credentials": [{"mechanism": "SCRAM-SHA-512", "iterations": 4096}]} in listed
        assert kafka("users", "remove", user, "--yes", "--json").json == {"removed": [user]}
        assert f"no user {user}" in kafka("users", "list", user, code=1).err

    def test_a_user_can_have_both_mechanisms_and_lose_one(self, kafka: Penstock, unique: Unique) -> None:
        user = unique("user")
        kafka("users", "add", user, "--mechanism", "both", "--password-stdin", stdin=b"x")
        assert len(kafka("users", "list", user).rows) == 3
        kafka("users", "remove", user, "--mechanism", "scram-sha-256", "--yes")
        assert kafka("users", "list", user).rows[1:] == [[user, "SCRAM-SHA-512", "8192"]]
        refused = kafka("users", "remove", user, "--mechanism", "SCRAM-SHA-256", "--yes", code=1)
        assert "has no password for SCRAM-SHA-256" in refused.err
        kafka("users", "remove", user, "--yes")

    def test_who_exists_is_not_added_and_who_does_not_is_not_changed(
        self, kafka: Penstock, unique: Unique
    ) -> None:
        user = unique("user")
        for verb in ("password", "remove"):
            refused = kafka("users", verb, user, code=1)
            assert f"there is no user {user}" in refused.err
        kafka("users", "add", user, "--password-stdin", stdin=b"x")
        again = kafka("users", "add", user, "--password-stdin", stdin=b"y", code=1)
        assert f"penstock users password {user}" in again.err
        refused = kafka("users", "remove", user, code=1)
        assert "--yes" in refused.err
        kafka("users", "remove", user, "--yes")


@pytest.fixture
def cluster() -> Iterator[FakeBroker]:
    """A cluster without users that takes every change."""

    def altered(request: AlterUserScramCredentialsRequest) -> AlterUserScramCredentialsResponse:
        return AlterUserScramCredentialsResponse.for_error(request, 0, ErrorCode.NONE)

    nobody = DescribeUserScramCredentialsResponse(error_message=None)
    with FakeBroker(nobody, api_51=altered) as fake:
        yield fake


def sent_password(cluster: FakeBroker) -> bytes:
    (request,) = [each for each in cluster.asked if isinstance(each, AlterUserScramCredentialsRequest)]
    (sent,) = request.upsertions
    assert sent.salted_password == scram.salted_password(
        "SCRAM-SHA-512", SECRET, bytes(sent.salt), sent.iterations
    )
    return bytes(sent.salted_password)


def test_a_password_comes_from_a_file(penstock: Penstock, cluster: FakeBroker, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\r\nsecond line\n")
    words = ("--bootstrap", cluster.bootstrap, "--password-file", str(file))
    done = penstock("users", "add", "alice", *words)
    assert done.code == 0, done
    assert sent_password(cluster)
    assert SECRET not in done.out + done.err


def test_a_password_is_asked_for_twice_without_echo(
    penstock: Penstock, cluster: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([SECRET, SECRET])
    monkeypatch.setattr("getpass.getpass", lambda _: next(typed))
    monkeypatch.setattr("tests.cli.conftest._pipe", lambda _: Terminal())
    assert penstock("users", "add", "alice", "--bootstrap", cluster.bootstrap).code == 0
    assert sent_password(cluster)


class Terminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("typed", [["a", "b"], [""]])
def test_two_different_passwords_or_none_change_nothing(
    penstock: Penstock, cluster: FakeBroker, monkeypatch: pytest.MonkeyPatch, typed: list[str]
) -> None:
    left = iter(typed)
    monkeypatch.setattr("getpass.getpass", lambda _: next(left))
    monkeypatch.setattr("tests.cli.conftest._pipe", lambda _: Terminal())
    done = penstock("users", "add", "alice", "--bootstrap", cluster.bootstrap)
    assert done.code == 1 and "nothing was done" in done.err
    assert len(cluster.asked) == 1


@pytest.mark.parametrize(
    ("words", "stdin", "code", "line"),
    [
        ((), b"", 2, "--password-stdin"),
        (("--password-stdin",), b"", 1, "no password in the first line of standard input"),
        (("--password-stdin",), b"\n\n", 1, "no password"),
        (("--password-stdin",), b"secret-\xff", 1, "is not UTF-8"),
        (("--password-stdin",), b"s" * 5000, 1, "more than 4096 bytes"),
        (("--password-stdin", "--password-file", "f"), b"", 2, "not both"),
        (("--password-file", "/nowhere/at-all"), b"", 1, "No such file"),
        (("--mechanism", "PLAIN"), b"", 2, "SCRAM-SHA-256"),
        (("--iterations", "100"), b"", 2, "4096"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_without_the_password(
    penstock: Penstock, cluster: FakeBroker, words: tuple[str, ...], stdin: bytes, code: int, line: str
) -> None:
    done = penstock("users", "add", "alice", *words, "--bootstrap", cluster.bootstrap, stdin=stdin)
    assert (done.code, done.err.count("\n")) == (code, 1) and line in done.err, done
    assert "secret" not in done.err
    assert not any(isinstance(each, AlterUserScramCredentialsRequest) for each in cluster.asked)


@pytest.mark.parametrize("name", ["", "a\nb", "a" * 300])
def test_a_name_that_cannot_be_is_refused_before_anything_is_sent(penstock: Penstock, name: str) -> None:
    done = penstock("users", "add", name, "--bootstrap", "127.0.0.1:1")
    assert done.code == 2 and "A user's name" in done.err and done.err.count("\n") == 1


def test_the_brokers_reason_is_shown(penstock: Penstock) -> None:
    def refused(request: AlterUserScramCredentialsRequest) -> AlterUserScramCredentialsResponse:
        return AlterUserScramCredentialsResponse.for_error(
            request, 0, ErrorCode.UNSUPPORTED_VERSION, "Not yet."
        )

    with FakeBroker(DescribeUserScramCredentialsResponse(error_message=None), api_51=refused) as fake:
        done = penstock("users", "add", "a", "--password-stdin", "--bootstrap", fake.bootstrap, stdin=b"x")
    assert (done.code, done.err) == (1, "penstock: could not change a: Not yet\n")


class TestBootstrap:
    def test_the_first_users_are_written_for_their_owner_only(
        self, penstock: Penstock, tmp_path: Path
    ) -> None:
        words = ("--data-dir", str(tmp_path / "data"), "--password-stdin")
        assert penstock("users", "bootstrap", "admin", *words, stdin=SECRET.encode()).code == 0
        more = penstock("users", "bootstrap", "root", "--mechanism", "both", "--json", *words, stdin=b"x")
        path = tmp_path / "data" / first_users.FILE_NAME
        assert more.json["file"] == str(path)
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        assert path.stat().st_mode & 0o777 == 0o600
        users = first_users.decode(path.read_bytes())
        assert sorted(users) == [("admin", 2), ("root", 1), ("root", 2)]
        stored = users["admin", ScramMechanism.SCRAM_SHA_512]
        salted = scram.salted_password("SCRAM-SHA-512", SECRET, stored.salt, stored.iterations)
        assert scram.matches("SCRAM-SHA-512", salted, scram.Keys(*stored))

    def test_a_cluster_that_exists_is_left_alone(self, penstock: Penstock, tmp_path: Path) -> None:
        (tmp_path / "meta.properties").touch()
        words = ("--data-dir", str(tmp_path), "--password-stdin")
        done = penstock("users", "bootstrap", "admin", *words, stdin=b"x")
        assert done.code == 1 and "penstock users add admin" in done.err
        assert os.listdir(tmp_path) == ["meta.properties"]

    def test_a_damaged_file_is_not_overwritten(self, penstock: Penstock, tmp_path: Path) -> None:
        path = tmp_path / first_users.FILE_NAME
        path.write_text("{")
        words = ("--data-dir", str(tmp_path), "--password-stdin")
        done = penstock("users", "bootstrap", "admin", *words, stdin=b"x")
        assert done.code == 1 and "is damaged" in done.err
        assert path.read_text() == "{"
