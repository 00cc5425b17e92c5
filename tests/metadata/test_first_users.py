"""The users that a new cluster begins with."""

from __future__ import annotations

import os
from random import Random

import pytest

from penstock.metadata import first_users
from penstock.metadata.changes import METADATA_VERSION
from penstock.metadata.controller import Controller
from penstock.metadata.features import SECURITY, may_secure
from penstock.metadata.image import Image
from penstock.metadata.security import ScramMechanism
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import FeatureLevelRecord, UserScramCredentialRecord
from penstock.sasl import scram
from tests.metadata.ensemble import CLUSTER, Ensemble
from tests.metadata.test_features import NEW, WITHOUT_COMPACTION, register

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
CREDENTIAL = first_users.credential(SHA_256, "a-password", Random(1).randbytes, 4096)
USERS = {("admin", SHA_256): CREDENTIAL}


def new_controller(image: Image | None = None) -> Controller:
    return Controller(image or Image(), random=Random(1), broker=1, static={})


def test_they_are_in_the_first_batch_with_the_level_that_they_need() -> None:
    on = new_controller()
    changes = on.found_cluster(CLUSTER, USERS).changes
    levels = [change.name for change in changes if isinstance(change, FeatureLevelRecord)]
    assert levels == [METADATA_VERSION, SECURITY]
    (user,) = [change for change in changes if isinstance(change, UserScramCredentialRecord)]
    assert (user.name, user.salt, user.stored_key) == ("admin", CREDENTIAL.salt, CREDENTIAL.stored_key)
    assert may_secure(on.image) and on.image.security.credentials == USERS
    assert changes.index(user) > 1, "after the level that allows it"
    on.check()


def test_without_them_a_cluster_begins_as_before() -> None:
    on = new_controller()
    assert len(on.found_cluster(CLUSTER, {}).changes) == 2
    assert not may_secure(on.image)


def test_a_cluster_that_exists_gets_none() -> None:
    on = new_controller()
    on.found_cluster(CLUSTER)
    assert on.found_cluster(CLUSTER, USERS).changes == []
    # Nor one that has only no id yet, from an older release.
    on = new_controller()
    on.found_cluster()
    assert len(on.found_cluster(CLUSTER, USERS).changes) == 1
    assert on.image.security.credentials == {}


def test_a_broker_that_does_not_know_users_is_not_registered() -> None:
    on = Ensemble(0)
    on.log.clear()
    on.replayed = Image()
    on.on = new_controller()
    on.decided(on.on.found_cluster(CLUSTER, USERS))
    assert register(on, 1, WITHOUT_COMPACTION) == ErrorCode.UNSUPPORTED_VERSION
    assert register(on, 1, NEW) == ErrorCode.NONE


def test_the_file_keeps_what_is_stored_and_no_secret() -> None:
    both = {**USERS, ("żółć", SHA_512): first_users.credential(SHA_512, "b", os.urandom)}
    data = first_users.encode(both)
    assert first_users.decode(data) == both
    salted = scram.salted_password(SHA_256.sasl_name, "a-password", CREDENTIAL.salt, 4096)
    for secret in (b"a-password", salted, salted.hex().encode()):
        assert secret not in data


def test_two_salts_are_never_the_same() -> None:
    assert first_users.salted(SHA_512, "a", os.urandom) != first_users.salted(SHA_512, "a", os.urandom)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"version": 1, "users": []}',
        b'{"version": 0, "users": [{}]}',
        b'{"version": 0, "users": 3}',
        first_users.encode(USERS)[:-10],
        first_users.encode(USERS).replace(b"SCRAM-SHA-256", b"SCRAM-SHA-1"),
        first_users.encode(USERS).replace(b"4096", b"1"),
        first_users.encode(USERS).replace(b'"admin"', b'""'),
        first_users.encode(USERS).replace(b'"admin"', b"7"),
        first_users.encode(USERS).replace(b'"salt": "', b'"salt": "?'),
    ],
)
def test_a_damaged_file_is_noticed(data: bytes) -> None:
    with pytest.raises(ValueError):
        first_users.decode(data)


def test_the_variable_has_a_user_and_a_password() -> None:
    assert first_users.parse_variable("admin:pass:word ") == ("admin", "pass:word ")
    for text in ("admin", "admin:", ":secret-one", "a\nb:secret-one"):
        with pytest.raises(ValueError) as caught:
            first_users.parse_variable(text)
        assert "secret-one" not in str(caught.value) and "\n" not in str(caught.value)
