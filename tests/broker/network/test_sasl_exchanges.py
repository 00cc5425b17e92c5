"""Names that nobody has, beside those of users: what a stranger sees of both is the same."""

from __future__ import annotations

import random

import pytest

from penstock.broker.network.sasl_exchanges import StoredCredentials, Users
from penstock.metadata.first_users import salted
from penstock.metadata.security import ScramCredential, ScramMechanism
from penstock.sasl import scram

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
DICE = random.Random(1)


def credential(salt: bytes, iterations: int) -> ScramCredential:
    return ScramCredential(salt, b"stored", b"server", iterations)


def ours(iterations: int = 8192) -> ScramCredential:
    salt, _ = salted(SHA_256, "x", DICE.randbytes, 4096)
    return credential(salt, iterations)


def users(stored: StoredCredentials) -> Users:
    return Users(lambda: stored, lambda: b"cluster")


def seen(keys: scram.Keys) -> tuple[int, int, bool]:
    return keys.iterations, len(keys.salt), keys.salt.isalnum()


@pytest.mark.parametrize("mechanism", ScramMechanism)
def test_each_mechanism_has_the_iterations_of_its_own_users(mechanism: ScramMechanism) -> None:
    """Kafka's tools use 4096 by default and ours 8192."""
    stored = {(f"java{number}", SHA_256): ours(4096) for number in range(2)}
    stored |= {(f"user{number}", SHA_512): ours() for number in range(3)}
    found = users(stored)
    known = next(name for name, kind in stored if kind is mechanism)
    assert seen(found.keys("nobody", mechanism)) == seen(found.keys(known, mechanism))


@pytest.mark.parametrize("size", [1, 25, 26, 64, 255])
def test_a_salt_is_as_those_of_the_tool_that_made_the_users(size: int) -> None:
    """librdkafka's salts have 64 bytes of any value."""
    stored = {(f"user{number}", SHA_512): credential(bytes([255]) * size, 8192) for number in range(3)}
    found = users(stored)
    made_up = found.keys("nobody", SHA_512)
    assert (made_up.iterations, len(made_up.salt)) == (8192, size)
    assert found.keys("nobody", SHA_512) == made_up
    if size > 1:
        assert found.keys("somebody", SHA_512).salt != made_up.salt
        assert found.keys("nobody", SHA_256).salt != made_up.salt
    # A mechanism that no user has looks like the other one.
    assert len(found.keys("nobody", SHA_256).salt) == size


def test_brokers_that_have_users_in_another_order_agree() -> None:
    stored = {("a", SHA_512): ours(4096), ("b", SHA_512): ours(8192), ("c", SHA_512): ours(16384)}
    backwards = dict(reversed(stored.items()))
    assert users(stored).keys("nobody", SHA_512) == users(backwards).keys("nobody", SHA_512)


def test_without_users_a_name_has_what_kafka_gives() -> None:
    assert seen(users({}).keys("nobody", SHA_512)) == (4096, 26, True)
    assert seen(users({("a", SHA_512): ours()}).keys("nobody", SHA_512)) == (8192, 26, True)
