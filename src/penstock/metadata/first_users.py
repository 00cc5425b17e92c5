"""The users that a new cluster begins with, usually one administrator.

Nobody can log in to a cluster without users to create the first one, and there is no default password. So the first
users come from the machine of the founding controller: from a file in its data directory, which `penstock users
bootstrap` writes, or from the variable PENSTOCK_ADMIN. They are part of the first batch of the metadata log, and so
is the level of the feature that their records need. Both mean nothing to a cluster that exists already.

The file holds no password and no salted one, only what is stored in the metadata too. Who reads it can try out
passwords, but not log in.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

from penstock.metadata.security import ScramCredential, ScramMechanism
from penstock.metadata.users import name_error
from penstock.sasl import scram
from penstock.sasl.scram import ITERATIONS_MAX, ITERATIONS_MIN

FILE_NAME = "penstock-first-users"
VARIABLE = "PENSTOCK_ADMIN"
FILE_BYTES_MAX = 1 << 20
# What our commands use.
MECHANISM = ScramMechanism.SCRAM_SHA_512
ITERATIONS = 8192
SALT_RANDOM_BYTES = 32

Credentials = Mapping[tuple[str, ScramMechanism], ScramCredential]


def salted(
    mechanism: ScramMechanism,
    password: str,
    random_bytes: Callable[[int], bytes],
    iterations: int = ITERATIONS,
) -> tuple[bytes, bytes]:
    """A new salt, and the password salted with it. Takes some milliseconds. Raises SaslError."""
    salt = scram.salt_from(random_bytes(SALT_RANDOM_BYTES))
    return salt, scram.salted_password(mechanism.sasl_name, password, salt, iterations)


def credential(
    mechanism: ScramMechanism,
    password: str,
    random_bytes: Callable[[int], bytes],
    iterations: int = ITERATIONS,
) -> ScramCredential:
    """What is stored of a password. Raises SaslError."""
    salt, made = salted(mechanism, password, random_bytes, iterations)
    return ScramCredential(*scram.keys(mechanism.sasl_name, made, salt, iterations))


def parse_variable(text: str) -> tuple[str, str]:
    """User and password. Raises ValueError with one line that does not contain them."""
    user, colon, password = text.partition(":")
    if not colon or not password:
        raise ValueError("write USER:PASSWORD")
    if (error := name_error(user)) is not None:
        raise ValueError(error.removesuffix("."))
    return user, password


def encode(credentials: Credentials) -> bytes:
    """The content of the file."""
    users = [
        {
            "user": user,
            "mechanism": mechanism.sasl_name,
            "iterations": each.iterations,
            **{
                name: b64encode(getattr(each, name)).decode() for name in ("salt", "stored_key", "server_key")
            },
        }
        for (user, mechanism), each in credentials.items()
    ]
    return json.dumps({"version": 0, "users": users}, indent=2).encode() + b"\n"


def decode(data: bytes) -> dict[tuple[str, ScramMechanism], ScramCredential]:
    """Raises ValueError for anything that ``encode`` did not write."""
    try:
        document = json.loads(data)
        if document["version"] != 0:
            raise ValueError("another version")
        return dict(map(_user, document["users"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not as it should be: {error!r}") from None


def _user(entry: Any) -> tuple[tuple[str, ScramMechanism], ScramCredential]:
    mechanism = ScramMechanism[entry["mechanism"].replace("-", "_")]
    salt, stored_key, server_key = (
        b64decode(entry[name], validate=True) for name in ("salt", "stored_key", "server_key")
    )
    iterations = int(entry["iterations"])
    if name_error(entry["user"]) or not salt or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ValueError("a user that would be refused")
    return (entry["user"], mechanism), ScramCredential(salt, stored_key, server_key, iterations)
