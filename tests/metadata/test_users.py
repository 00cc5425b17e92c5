"""Users: whose credentials are accepted, what is stored of them, and what anybody may see."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.metadata import users
from penstock.metadata.security import ScramMechanism
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import UserScramCredentialRecord
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResult,
    DescribeUserScramCredentialsRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
    UserName,
)
from penstock.protocol.schema import encode
from penstock.sasl import scram
from tests.metadata.ensemble import Ensemble
from tests.metadata.test_features import NEW, WITHOUT_COMPACTION, cluster

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
PASSWORD, SALT, ITERATIONS = "a-password", b"0123456789abcdef", 4096


@pytest.fixture
def on() -> Ensemble:
    return cluster(NEW)


def upsertion(name: str = "alice", mechanism: int = SHA_512, **changed: Any) -> ScramCredentialUpsertion:
    size = 32 if mechanism == SHA_256 else 64
    values = {"iterations": ITERATIONS, "salt": SALT, "salted_password": b"s" * size, **changed}
    return ScramCredentialUpsertion(name=name, mechanism=mechanism, **values)


def deletion(name: str = "alice", mechanism: int = SHA_512) -> ScramCredentialDeletion:
    return ScramCredentialDeletion(name=name, mechanism=mechanism)


def alter(
    on: Ensemble, *asked: ScramCredentialUpsertion | ScramCredentialDeletion
) -> list[AlterUserScramCredentialsResult]:
    request = AlterUserScramCredentialsRequest(
        deletions=[each for each in asked if isinstance(each, ScramCredentialDeletion)],
        upsertions=[each for each in asked if isinstance(each, ScramCredentialUpsertion)],
    )
    results: list[AlterUserScramCredentialsResult] = on.handle(request).results
    return results


def errors(on: Ensemble, *asked: ScramCredentialUpsertion | ScramCredentialDeletion) -> list[tuple[str, int]]:
    return [(result.user, result.error_code) for result in alter(on, *asked)]


def known(on: Ensemble) -> list[tuple[str, ScramMechanism]]:
    return sorted(on.on.image.security.credentials)


def described(on: Ensemble, names: Sequence[str] | None) -> dict[str, Any]:
    asked = None if names is None else [UserName(name=name) for name in names]
    response = users.describe_credentials(
        on.on.image.security, DescribeUserScramCredentialsRequest(users=asked)
    )
    assert response.error_code == ErrorCode.NONE
    return {
        each.user: each.error_code or [(info.mechanism, info.iterations) for info in each.credential_infos]
        for each in response.results
    }


def test_a_new_user_can_be_recognised_by_the_password_and_by_no_other(on: Ensemble) -> None:
    name = SHA_256.sasl_name
    salted = scram.salted_password(name, PASSWORD, SALT, ITERATIONS)
    assert errors(on, upsertion(mechanism=SHA_256, salted_password=salted)) == [("alice", ErrorCode.NONE)]
    stored = on.on.image.security.credentials["alice", SHA_256]
    assert scram.matches(name, salted, scram.Keys(*stored))
    other = scram.salted_password(name, "b-password", SALT, ITERATIONS)
    assert not scram.matches(name, other, scram.Keys(*stored))


def test_neither_the_salted_password_nor_a_client_key_is_written(on: Ensemble) -> None:
    salted = scram.salted_password(SHA_512.sasl_name, PASSWORD, SALT, ITERATIONS)
    alter(on, upsertion(salted_password=salted))
    (record,) = [change for change in on.log if isinstance(change, UserScramCredentialRecord)]
    written = encode(record, 0)
    assert salted not in written and PASSWORD.encode() not in written
    assert hashlib.sha512(record.stored_key).digest() not in written
    assert record.stored_key in written and "a-password" not in repr(on.on.image.security)


def test_a_user_has_a_credential_for_each_mechanism(on: Ensemble) -> None:
    assert errors(on, upsertion(mechanism=SHA_256), upsertion(mechanism=SHA_512)) == [("alice", 0)]
    assert known(on) == [("alice", SHA_256), ("alice", SHA_512)]
    assert errors(on, deletion(mechanism=SHA_256), upsertion(mechanism=SHA_512, iterations=8192)) == [
        ("alice", 0)
    ]
    assert described(on, None) == {"alice": [(SHA_512, 8192)]}


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"name": ""}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"name": "a\nb"}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"name": "a\x00"}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"name": "a" * 256}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"iterations": 4095}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"iterations": 16385}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"iterations": -1}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"salt": b""}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"salt": b"s" * 256}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"salted_password": b""}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"salted_password": b"s" * 32}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"mechanism": SHA_256, "salted_password": b"s" * 64}, ErrorCode.UNACCEPTABLE_CREDENTIAL),
        ({"mechanism": 0}, ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        ({"mechanism": 3}, ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        ({"mechanism": -1}, ErrorCode.UNSUPPORTED_SASL_MECHANISM),
    ],
)
def test_a_credential_that_kafka_would_not_take_is_refused(
    on: Ensemble, changed: dict[str, Any], error: ErrorCode
) -> None:
    (result,) = alter(on, upsertion(**changed))
    assert result.error_code == error
    assert result.error_message and "\n" not in result.error_message
    assert known(on) == []


def test_limits_include_their_ends(on: Ensemble) -> None:
    assert errors(
        on,
        upsertion("a" * 255, iterations=4096, salt=b"s"),
        upsertion("b", iterations=16384, salt=b"s" * 255),
        upsertion("żółć ☃, =2C", mechanism=SHA_256),
    ) == [("a" * 255, 0), ("b", 0), ("żółć ☃, =2C", 0)]


def test_the_same_credential_cannot_be_changed_twice_at_once(on: Ensemble) -> None:
    alter(on, upsertion("alice"))
    duplicate = ErrorCode.DUPLICATE_RESOURCE
    assert errors(on, deletion("alice"), upsertion("alice"), upsertion("bob")) == [
        ("alice", duplicate),
        ("bob", 0),
    ]
    assert errors(on, upsertion("carol"), upsertion("carol")) == [("carol", duplicate)]
    assert errors(on, deletion("alice"), deletion("alice")) == [("alice", duplicate)]
    assert known(on) == [("alice", SHA_512), ("bob", SHA_512)]


def test_a_credential_that_does_not_exist_cannot_be_removed(on: Ensemble) -> None:
    alter(on, upsertion("alice"))
    assert errors(on, deletion("alice", SHA_256), deletion("bob")) == [
        ("alice", ErrorCode.RESOURCE_NOT_FOUND),
        ("bob", ErrorCode.RESOURCE_NOT_FOUND),
    ]


def test_a_user_is_changed_whole_or_not_at_all(on: Ensemble) -> None:
    alter(on, upsertion("alice", SHA_256))
    (result,) = alter(on, deletion("alice", SHA_256), upsertion("alice", SHA_512, iterations=1))
    assert result.error_code == ErrorCode.UNACCEPTABLE_CREDENTIAL
    assert known(on) == [("alice", SHA_256)]


def test_there_is_a_limit_on_credentials(on: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "CREDENTIALS_MAX", 3)
    both = [upsertion("b", SHA_256), upsertion("b", SHA_512)]
    assert errors(on, upsertion("a"), *both, upsertion("c")) == [
        ("a", 0),
        ("b", 0),
        ("c", ErrorCode.POLICY_VIOLATION),
    ]
    # Replacing and removing work at the limit, and what is removed makes room in the same request.
    assert errors(on, upsertion("a")) == [("a", 0)]
    assert errors(on, deletion("a"), upsertion("c")) == [("a", 0), ("c", 0)]
    assert known(on) == [("b", SHA_256), ("b", SHA_512), ("c", SHA_512)]


def test_nothing_is_written_before_every_broker_understands_it() -> None:
    on = cluster(WITHOUT_COMPACTION, NEW)
    before = len(on.log)
    (result,) = alter(on, upsertion())
    assert result.error_code == ErrorCode.UNSUPPORTED_VERSION and result.error_message
    assert len(on.log) == before


def test_descriptions_say_who_is_unknown_and_who_was_named_twice(on: Ensemble) -> None:
    alter(on, upsertion("bob", SHA_256), upsertion("alice"))
    everybody = {"alice": [(SHA_512, ITERATIONS)], "bob": [(SHA_256, ITERATIONS)]}
    assert described(on, None) == described(on, []) == everybody
    assert described(on, ["bob", "carol", "alice", "alice"]) == {
        "bob": [(SHA_256, ITERATIONS)],
        "carol": ErrorCode.RESOURCE_NOT_FOUND,
        "alice": ErrorCode.DUPLICATE_RESOURCE,
    }


def test_a_new_controller_knows_the_users(on: Ensemble) -> None:
    alter(on, upsertion("alice"))
    on.fail_over()
    assert known(on) == [("alice", SHA_512)]
    assert errors(on, deletion("alice")) == [("alice", 0)]
