"""The first users of a broker's own cluster, in virtual time: from a variable, from a file, and only once."""

from __future__ import annotations

import json
import os
from random import Random

import pytest

from penstock.broker.controller.first_users import FirstUsers
from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.metadata import first_users
from penstock.metadata.features import may_secure
from penstock.metadata.image import Image
from penstock.metadata.security import ScramMechanism
from penstock.sasl import scram
from tests.support_files import FakeClock, FakeFiles
from tests.virtual import World

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
PATH = f"/data/{first_users.FILE_NAME}"
USERS = {("root", SHA_256): first_users.credential(SHA_256, "of-the-file", Random(1).randbytes, 4096)}


def with_file(data: bytes) -> FakeFiles:
    files = FakeFiles(FakeClock())
    files.make_directory("/data")
    files.replace(PATH, data)
    return files


def has_password(world: World, user: str, password: str) -> bool:
    stored = world.broker.image.security.credentials[user, SHA_512]
    name = SHA_512.sasl_name
    salted = scram.salted_password(name, password, stored.salt, stored.iterations)
    return scram.matches(name, salted, scram.Keys(*stored))


def warnings(text: str) -> list[str]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line["event"] for line in lines if line["level"] == "warning" and "first user" in line["event"]]


def test_a_new_cluster_begins_with_the_user_of_the_variable(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(admin="admin:a:b")
    assert has_password(world, "admin", "a:b")
    assert may_secure(world.broker.image)
    captured = capfd.readouterr()
    assert warnings(captured.err) == [] and "a:b" not in captured.err + captured.out


def test_a_later_start_ignores_the_variable_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(admin="admin:first")
    capfd.readouterr()
    again = world.restarted(clean=True, admin="admin:second")
    assert has_password(again, "admin", "first") and not has_password(again, "admin", "second")
    (warning,) = warnings(capfd.readouterr().err)
    assert "penstock users" in warning
    # Without it there is nothing to say.
    again.restarted(clean=False)
    assert warnings(capfd.readouterr().err) == []


def test_a_cluster_without_users_does_not_get_one_later(capfd: pytest.CaptureFixture[str]) -> None:
    world = World().restarted(clean=True, admin="admin:password")
    assert world.broker.image.security.credentials == {}
    assert len(warnings(capfd.readouterr().err)) == 1


def test_a_new_cluster_begins_with_the_users_of_the_file_which_is_removed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    files = with_file(first_users.encode(USERS))
    world = World(files=files, admin="admin:password")
    assert world.broker.image.security.credentials["root", SHA_256] == USERS["root", SHA_256]
    assert has_password(world, "admin", "password")
    assert not files.exists(PATH)
    assert warnings(capfd.readouterr().err) == []


def test_a_file_that_comes_too_late_is_ignored_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.files.replace(PATH, first_users.encode(USERS))
    again = world.restarted(clean=True)
    assert again.broker.image.security.credentials == {}
    assert len(warnings(capfd.readouterr().err)) == 1
    assert not again.files.exists(PATH)


def test_a_file_that_was_copied_to_the_node_that_founded_the_cluster_is_removed_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As on the other controllers of a new cluster."""
    founder = World(files=with_file(first_users.encode(USERS)))
    founder.files.replace(PATH, first_users.encode(USERS))
    capfd.readouterr()
    other = FirstUsers(founder.environment, "/data", None, Logger(node=2))
    other.committed(Image())
    assert founder.files.exists(PATH), "no cluster exists yet"
    other.committed(founder.broker.image)
    assert not founder.files.exists(PATH)
    assert warnings(capfd.readouterr().err) == []


def test_a_damaged_file_stops_the_start_in_one_line() -> None:
    with pytest.raises(ServeError, match=f"{os.path.basename(PATH)} is damaged"):
        World(files=with_file(b'{"version": 0, "users": [{"user": "root", "password": "secret"}]}'))


@pytest.mark.parametrize("text", ["admin", "admin:", ":password", "\x07:password", "admin:\udcff"])
def test_a_variable_without_user_or_password_stops_the_start(text: str) -> None:
    with pytest.raises(ServeError, match="PENSTOCK_ADMIN: ") as caught:
        World(admin=text)
    assert "password" not in str(caught.value)
