"""Client quotas as metadata: AlterClientQuotas is decided here, DescribeClientQuotas is answered here (KIP-546).

An entity is a user, a client id, both together, or an address (ip). A part of it without a name is the default, for
everything that has no quota of its own. Each entity of a request succeeds or fails alone. The checks and their
errors are Kafka's, except that an ip must be an address: Kafka also looks up names of hosts.

How the quotas are enforced is up to each broker (``broker/network/quotas.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from math import isfinite

from penstock.metadata.features import may_secure
from penstock.metadata.image import Image
from penstock.metadata.refusal import Refusal
from penstock.metadata.security import QuotaEntity, as_address, quota_record
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import ClientQuotaRecord, QuotaEntityPart
from penstock.protocol.messages.quotas import (
    MATCH_DEFAULT,
    MATCH_EXACT,
    MATCH_SPECIFIED,
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    QuotaAlterationResult,
    QuotaEntry,
    QuotaOp,
    QuotaValue,
)

USER, CLIENT_ID, IP = "user", "client-id", "ip"
ENTITY_TYPES = (USER, CLIENT_ID, IP)

# Bytes per second of produced records, and of fetched ones.
PRODUCER_BYTE_RATE = "producer_byte_rate"
CONSUMER_BYTE_RATE = "consumer_byte_rate"
# Percent of the time of the broker's loop.
REQUEST_PERCENTAGE = "request_percentage"
# Partitions per second that are created or deleted (KIP-599).
CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
# Connections per second from one address (KIP-612).
CONNECTION_CREATION_RATE = "connection_creation_rate"

OF_CLIENTS = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE, CONTROLLER_MUTATION_RATE)
OF_ADDRESSES = (CONNECTION_CREATION_RATE,)
# The largest value of each key that has to be a whole number.
WHOLE_MAX = {
    PRODUCER_BYTE_RATE: 2**63 - 1,
    CONSUMER_BYTE_RATE: 2**63 - 1,
    CONNECTION_CREATION_RATE: 2**31 - 1,
}

# So that metadata stays small enough for the memory of every node.
ENTITIES_MAX = 100_000
NAME_MAX = 1000

NOT_YET = (
    "Quotas can be set once all brokers have been upgraded (`penstock features` shows penstock.security)."
)


def alter_client_quotas(
    request: AlterClientQuotasRequest, image: Image
) -> tuple[Sequence[ClientQuotaRecord], AlterClientQuotasResponse]:
    changes: list[ClientQuotaRecord] = []
    results = []
    known = image.security.quotas
    named: dict[QuotaEntity, int] = {}
    for asked in request.entries:
        key = _sorted(asked.entity)
        named[key] = named.get(key, 0) + 1
    # Entities with quotas, if all changes so far are made.
    count = len(known)
    for asked in request.entries:
        result = QuotaAlterationResult(entity=asked.entity, error_message=None)
        results.append(result)
        try:
            if not may_secure(image):
                raise Refusal(ErrorCode.UNSUPPORTED_VERSION, NOT_YET)
            if named[_sorted(asked.entity)] > 1:
                raise _invalid("Each entity may be named once.")
            entity = _checked_entity(asked.entity)
            made = _altered(entity, asked.ops, known.get(entity, {}))
            if entity not in known and made:
                if count >= ENTITIES_MAX:
                    raise _invalid(f"There are quotas for {ENTITIES_MAX} entities already.")
                count += 1
            changes += made
        except Refusal as refusal:
            result.error_code, result.error_message = refusal.error, refusal.message
    return changes, AlterClientQuotasResponse(entries=results)


def describe_client_quotas(
    request: DescribeClientQuotasRequest, quotas: Mapping[QuotaEntity, Mapping[str, float]]
) -> DescribeClientQuotasResponse:
    try:
        exact, specified = _filters(request)
    except Refusal as refusal:
        return DescribeClientQuotasResponse(
            error_code=refusal.error, error_message=refusal.message, entries=None
        )
    entries = []
    for entity, values in quotas.items():
        parts = dict(entity)
        if (
            all(type in parts and parts[type] == name for type, name in exact.items())
            and all(type in parts for type in specified)
            and not (request.strict and any(type not in exact and type not in specified for type in parts))
        ):
            entries.append(
                QuotaEntry(
                    entity=entity_parts(entity),
                    values=[QuotaValue(key=key, value=value) for key, value in values.items()],
                )
            )
    return DescribeClientQuotasResponse(error_message=None, entries=entries)


def entity_parts(entity: QuotaEntity) -> list[QuotaEntityPart]:
    return [QuotaEntityPart(entity_type=type, entity_name=name) for type, name in entity]


def keys_of(types: Iterable[str]) -> tuple[str, ...]:
    """The quotas that an entity of these types can have."""
    return OF_ADDRESSES if IP in types else OF_CLIENTS


def _checked_entity(parts: Sequence[QuotaEntityPart]) -> QuotaEntity:
    """Raises Refusal."""
    if not parts:
        raise _invalid("An entity needs a user, a client-id or an ip.")
    types = [part.entity_type for part in parts]
    for part in parts:
        type, name = part.entity_type, part.entity_name
        if type not in ENTITY_TYPES:
            raise _invalid(f"There is no entity type {type!r}. Types: {', '.join(ENTITY_TYPES)}.")
        if types.count(type) > 1:
            raise _invalid(f"An entity has one {type}.")
        if name == "":
            raise _invalid(f"The name of a {type} must not be empty. The default has none (null).")
        if name is not None and len(name) > NAME_MAX:
            raise _invalid(f"The name of a {type} has at most {NAME_MAX} characters.")
        if type == IP and name is not None and not _is_address(name):
            raise _invalid(f"{name!r} is not an IP address.")
    if IP in types and len(types) > 1:
        raise _invalid("An ip cannot be combined with a user or a client-id.")
    return _sorted(parts)


def _altered(
    entity: QuotaEntity, ops: Sequence[QuotaOp], before: Mapping[str, float]
) -> list[ClientQuotaRecord]:
    """Raises Refusal."""
    allowed = keys_of([type for type, _ in entity])
    changes = []
    keys = [op.key for op in ops]
    for op in ops:
        key = op.key
        if keys.count(key) > 1:
            raise _invalid(f"Each quota may be named once: {key}.")
        if key not in allowed:
            raise _invalid(f"There is no quota {key!r} of this entity. Quotas: {', '.join(allowed)}.")
        if op.remove:
            if key in before:
                changes.append(quota_record(entity, key, None))
            continue
        if not isfinite(op.value) or op.value <= 0:
            raise _invalid(f"{key} must be greater than 0.")
        if key in WHOLE_MAX:
            if op.value > WHOLE_MAX[key]:
                raise _invalid(f"{key} is at most {WHOLE_MAX[key]}.")
            if abs(op.value - round(op.value)) > 1e-6:
                raise _invalid(f"{key} must be a whole number.")
        if before.get(key) != op.value:
            changes.append(quota_record(entity, key, op.value))
    return changes


def _filters(request: DescribeClientQuotasRequest) -> tuple[dict[str, str | None], dict[str, None]]:
    """The names that are asked for by type, and the types that may have any name. Raises Refusal."""
    exact: dict[str, str | None] = {}
    specified: dict[str, None] = {}
    for component in request.components:
        type, match = component.entity_type, component.match
        if not type:
            raise _invalid("An entity type must not be empty.")
        if type not in ENTITY_TYPES:
            raise Refusal(
                ErrorCode.UNSUPPORTED_VERSION,
                f"There is no entity type {type!r}. Types: {', '.join(ENTITY_TYPES)}.",
            )
        if type in exact or type in specified:
            raise _invalid(f"The type {type} may be named once.")
        if (component.match_type == MATCH_EXACT) == (match is None):
            raise _invalid("A filter has a name if it matches exactly, and only then.")
        if component.match_type in (MATCH_EXACT, MATCH_DEFAULT):
            exact[type] = _name(type, match)
        elif component.match_type == MATCH_SPECIFIED:
            specified[type] = None
        else:
            raise _invalid(f"There is no match type {component.match_type}.")
    types = [*exact, *specified]
    if IP in types and len(types) > 1:
        raise _invalid("An ip cannot be combined with a user or a client-id.")
    return exact, specified


def _sorted(parts: Iterable[QuotaEntityPart]) -> QuotaEntity:
    return tuple(
        sorted(
            ((part.entity_type, _name(part.entity_type, part.entity_name)) for part in parts),
            key=lambda part: (part[0], part[1] or "", part[1] is None),
        )
    )


def _name(type: str, name: str | None) -> str | None:
    return as_address(name) if type == IP and name is not None else name


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _invalid(message: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_REQUEST, message)
