"""Decisions about users: AlterUserScramCredentials (KIP-554), and the description of their credentials.

A client derives the salted password itself and sends it. The controller computes from it what a broker needs to
recognise the password, and forgets it: with the salted password, anybody could log in as this user; with what is
stored, nobody can (RFC 5802, section 9).

Kafka's rules: all changes of a user in a request are made, or none. Ours in addition: names have no control
characters and a bounded length, salts have a bounded length, and there is a limit on credentials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from penstock.metadata.decided_state import DecidedState
from penstock.metadata.features import may_secure
from penstock.metadata.refusal import Refusal
from penstock.metadata.security import (
    ScramCredential,
    ScramMechanism,
    SecurityImage,
    credential_record,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import RemoveUserScramCredentialRecord
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
    ScramCredentialDeletion,
    ScramCredentialInfo,
    ScramCredentialUpsertion,
)
from penstock.protocol.schema import Message
from penstock.sasl import scram
from penstock.sasl.scram import ITERATIONS_MAX, ITERATIONS_MIN

NAME_CHARACTERS_MAX = 255
# librdkafka's salts have 64 bytes, and Java's about 25.
SALT_BYTES_MAX = 255
# In all, each user having one or two.
CREDENTIALS_MAX = 10_000

_MECHANISMS = ", ".join(f"{each.value} ({each.sasl_name})" for each in ScramMechanism)

NOT_YET = (
    "Some brokers do not support users and ACLs yet: upgrade them, or unregister those that are gone for good "
    "(feature penstock.security)."
)


def name_error(name: str) -> str | None:
    """Why this cannot be the name of a user; None if it can."""
    if not name:
        return "A user's name must not be empty."
    if len(name) > NAME_CHARACTERS_MAX:
        return f"A user's name has at most {NAME_CHARACTERS_MAX} characters, not {len(name)}."
    if not name.isprintable():
        return "A user's name must not have control characters."
    return None


def alter_credentials(
    decided: DecidedState, request: AlterUserScramCredentialsRequest
) -> AlterUserScramCredentialsResponse:
    """Add, replace and remove credentials; each user's changes are made all or not at all."""
    if not may_secure(decided.image):
        return AlterUserScramCredentialsResponse.for_error(request, 0, ErrorCode.UNSUPPORTED_VERSION, NOT_YET)
    wanted: dict[str, list[ScramCredentialDeletion | ScramCredentialUpsertion]] = {}
    for deletion in request.deletions:
        wanted.setdefault(deletion.name, []).append(deletion)
    for upsertion in request.upsertions:
        wanted.setdefault(upsertion.name, []).append(upsertion)
    known = decided.image.security.credentials
    changes: list[Message] = []
    results = []
    # Once all changes so far are made.
    count = len(known)
    for user, asked in wanted.items():
        result = AlterUserScramCredentialsResult(user=user, error_message=None)
        try:
            made = _changes(known, user, asked)
            after = count + sum(
                -1 if isinstance(change, RemoveUserScramCredentialRecord) else (user, mechanism) not in known
                for mechanism, change in made.items()
            )
            if after > max(count, CREDENTIALS_MAX):
                raise Refusal(
                    ErrorCode.POLICY_VIOLATION, f"There can be {CREDENTIALS_MAX} credentials in all."
                )
            changes += made.values()
            count = after
        except Refusal as refusal:
            result.error_code, result.error_message = refusal.error, refusal.message
        results.append(result)
    decided.take(changes)
    return AlterUserScramCredentialsResponse(results=results)


def describe_credentials(
    security: SecurityImage, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    """The mechanisms and iterations of users, and nothing that would help to guess a password."""
    infos: dict[str, list[ScramCredentialInfo]] = {}
    for user, mechanism in sorted(security.credentials):
        iterations = security.credentials[user, mechanism].iterations
        infos.setdefault(user, []).append(ScramCredentialInfo(mechanism=mechanism, iterations=iterations))
    names = [each.name for each in request.users or ()] or list(infos)
    times: dict[str, int] = {}
    for name in names:
        times[name] = times.get(name, 0) + 1
    results = []
    for user, count in times.items():
        result = DescribeUserScramCredentialsResult(user=user, error_message=None)
        if count > 1:
            result.error_code = ErrorCode.DUPLICATE_RESOURCE
            result.error_message = "Each user may be named once."
        elif user not in infos:
            result.error_code = ErrorCode.RESOURCE_NOT_FOUND
            result.error_message = "There is no such user."
        else:
            result.credential_infos = infos[user]
        results.append(result)
    return DescribeUserScramCredentialsResponse(error_message=None, results=results)


def _changes(
    known: Mapping[tuple[str, ScramMechanism], ScramCredential],
    user: str,
    wanted: Iterable[ScramCredentialDeletion | ScramCredentialUpsertion],
) -> dict[ScramMechanism, Message]:
    """What is decided about a user. Raises Refusal."""
    changes: dict[ScramMechanism, Message] = {}
    for each in wanted:
        mechanism = _mechanism(each.mechanism)
        if (error := name_error(user)) is not None:
            raise _unacceptable(error)
        if mechanism in changes:
            raise Refusal(
                ErrorCode.DUPLICATE_RESOURCE, "A credential cannot be changed twice in the same request."
            )
        match each:
            case ScramCredentialUpsertion():
                changes[mechanism] = credential_record(user, mechanism, _credential(mechanism, each))
            case ScramCredentialDeletion():
                if (user, mechanism) not in known:
                    raise Refusal(
                        ErrorCode.RESOURCE_NOT_FOUND, f"The user has no {mechanism.sasl_name} credential."
                    )
                changes[mechanism] = RemoveUserScramCredentialRecord(name=user, mechanism=mechanism)
    return changes


def _mechanism(number: int) -> ScramMechanism:
    try:
        return ScramMechanism(number)
    except ValueError:
        raise Refusal(
            ErrorCode.UNSUPPORTED_SASL_MECHANISM,
            f"There is no mechanism {number}. Mechanisms: {_MECHANISMS}.",
        ) from None


def _credential(mechanism: ScramMechanism, asked: ScramCredentialUpsertion) -> ScramCredential:
    if not ITERATIONS_MIN <= asked.iterations <= ITERATIONS_MAX:
        raise _unacceptable(
            f"Iterations must be {ITERATIONS_MIN} to {ITERATIONS_MAX}, not {asked.iterations}."
        )
    if not 1 <= len(asked.salt) <= SALT_BYTES_MAX:
        raise _unacceptable(f"A salt has 1 to {SALT_BYTES_MAX} bytes, not {len(asked.salt)}.")
    size = hashlib.new(scram.HASHES[mechanism.sasl_name]).digest_size
    if len(asked.salted_password) != size:
        raise _unacceptable(
            f"A salted password of {mechanism.sasl_name} has {size} bytes, not {len(asked.salted_password)}."
        )
    salt, salted = bytes(asked.salt), bytes(asked.salted_password)
    return ScramCredential(*scram.keys(mechanism.sasl_name, salted, salt, asked.iterations))


def _unacceptable(message: str) -> Refusal:
    return Refusal(ErrorCode.UNACCEPTABLE_CREDENTIAL, message)
