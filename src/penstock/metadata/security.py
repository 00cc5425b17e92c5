"""What the metadata knows of security: credentials of users, access control entries and client quotas.

Plain immutable values, and ``SecurityDraft``, which writes them for one batch of changes. None of these records is
written before every broker understands them (the feature SECURITY in ``features.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from penstock.protocol.messages.metadata_records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    QuotaEntityPart,
    RemoveAccessControlEntryRecord,
    RemoveUserScramCredentialRecord,
    UserScramCredentialRecord,
)
from penstock.protocol.schema import Message

SecurityRecord = (
    UserScramCredentialRecord
    | RemoveUserScramCredentialRecord
    | AccessControlEntryRecord
    | RemoveAccessControlEntryRecord
    | ClientQuotaRecord
)


class ScramMechanism(IntEnum):
    """Kafka's numbers."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def sasl_name(self) -> str:
        return self.name.replace("_", "-")


class ScramCredential(NamedTuple):
    """What a broker needs to recognise a user's password, without knowing it (RFC 5802)."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        # Never in a log or an error.
        return f"ScramCredential(iterations={self.iterations})"


class Acl(NamedTuple):
    """An access control entry, with Kafka's numbers and texts. Records and messages have the same field names."""

    # The numbers have their names in ``acls.py``.
    resource_type: int
    resource_name: str
    pattern_type: int
    # "User:alice", or "User:*" for everybody.
    principal: str
    # An address, or "*".
    host: str
    operation: int
    permission_type: int


# The parts of an entity, sorted by type: (("client-id", "app"), ("user", "alice")). None for the default.
QuotaEntity = tuple[tuple[str, str | None], ...]


class SecurityDelta(NamedTuple):
    # Users whose credentials were added, replaced or removed.
    users: tuple[str, ...] = ()
    has_acls: bool = False
    has_quotas: bool = False


NO_SECURITY_CHANGE = SecurityDelta()


@dataclass(frozen=True, slots=True)
class SecurityImage:
    # By user and mechanism.
    credentials: Mapping[tuple[str, ScramMechanism], ScramCredential] = field(default_factory=dict)
    # By id.
    acls: Mapping[bytes, Acl] = field(default_factory=dict)
    # Only entities with at least one quota.
    quotas: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)

    def snapshot(self) -> list[Message]:
        """The changes that build this image from an empty one."""
        changes: list[Message] = [
            credential_record(user, mechanism, credential)
            for (user, mechanism), credential in self.credentials.items()
        ]
        changes += [acl_record(id, acl) for id, acl in self.acls.items()]
        changes += [
            quota_record(entity, key, value)
            for entity, quotas in self.quotas.items()
            for key, value in quotas.items()
        ]
        return changes

    def changed_since(self, before: SecurityImage) -> SecurityDelta:
        """The difference to an earlier image, computed without the changes in between."""
        known = dict.fromkeys((*before.credentials, *self.credentials))
        users = [
            user
            for user, mechanism in known
            if before.credentials.get((user, mechanism)) != self.credentials.get((user, mechanism))
        ]
        return SecurityDelta(
            tuple(dict.fromkeys(users)), before.acls != self.acls, before.quotas != self.quotas
        )

    def check(self) -> None:
        assert len(set(self.acls.values())) == len(self.acls), "the same ACL under two ids"
        for entity, quotas in self.quotas.items():
            assert quotas, f"{entity} is listed but has no quotas"
            assert list(entity) == sorted(entity, key=lambda part: part[0]), entity


def credential_record(
    user: str, mechanism: ScramMechanism, credential: ScramCredential
) -> UserScramCredentialRecord:
    return UserScramCredentialRecord(
        name=user,
        mechanism=mechanism,
        salt=credential.salt,
        stored_key=credential.stored_key,
        server_key=credential.server_key,
        iterations=credential.iterations,
    )


def acl_record(id: bytes, acl: Acl) -> AccessControlEntryRecord:
    return AccessControlEntryRecord(id=id, **acl._asdict())


def quota_record(entity: QuotaEntity, key: str, value: float | None) -> ClientQuotaRecord:
    """The change of one quota; with None, its removal."""
    return ClientQuotaRecord(
        entity=[QuotaEntityPart(entity_type=type, entity_name=name) for type, name in entity],
        key=key,
        value=0.0 if value is None else value,
        remove=value is None,
    )


def as_address(host: str) -> str:
    """An address as brokers see their clients'. Java writes 2001:db8:0:0:0:0:0:1 where others write 2001:db8::1."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


class SecurityDraft:
    """A security image being written: every part is copied before its first change."""

    def __init__(self, base: SecurityImage) -> None:
        self._base = base
        self._credentials = dict(base.credentials)
        self._acls = dict(base.acls)
        self._quotas = dict(base.quotas)
        # In order, without repetition.
        self._users: dict[str, None] = {}
        self._has_acls = False
        self._has_quotas = False

    def apply(self, change: SecurityRecord) -> None:
        match change:
            case UserScramCredentialRecord():
                self._credentials[change.name, ScramMechanism(change.mechanism)] = ScramCredential(
                    change.salt, change.stored_key, change.server_key, change.iterations
                )
                self._users[change.name] = None
            case RemoveUserScramCredentialRecord():
                del self._credentials[change.name, ScramMechanism(change.mechanism)]
                self._users[change.name] = None
            case AccessControlEntryRecord():
                assert change.id not in self._acls, "an ACL has the id of another one"
                self._acls[change.id] = Acl(
                    change.resource_type,
                    change.resource_name,
                    change.pattern_type,
                    change.principal,
                    change.host,
                    change.operation,
                    change.permission_type,
                )
                self._has_acls = True
            case RemoveAccessControlEntryRecord():
                del self._acls[change.id]
                self._has_acls = True
            case ClientQuotaRecord():
                self._quota(change)

    def _quota(self, change: ClientQuotaRecord) -> None:
        entity = tuple(sorted((part.entity_type, part.entity_name) for part in change.entity))
        quotas = dict(self._quotas.get(entity, {}))
        if change.remove:
            quotas.pop(change.key, None)
        else:
            quotas[change.key] = change.value
        if quotas:
            self._quotas[entity] = quotas
        else:
            self._quotas.pop(entity, None)
        self._has_quotas = True

    def finish(self) -> tuple[SecurityImage, SecurityDelta]:
        image = SecurityImage(
            self._credentials if self._users else self._base.credentials,
            self._acls if self._has_acls else self._base.acls,
            self._quotas if self._has_quotas else self._base.quotas,
        )
        return image, SecurityDelta(tuple(self._users), self._has_acls, self._has_quotas)
