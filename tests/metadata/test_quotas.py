"""AlterClientQuotas as the controller decides it, and DescribeClientQuotas, with Kafka's checks."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan
from typing import Any

import pytest

from penstock.metadata import quotas
from penstock.metadata.features import SUPPORTED_FEATURES
from penstock.metadata.quotas import (
    CONNECTION_CREATION_RATE,
    CONTROLLER_MUTATION_RATE,
    NAME_MAX,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    describe_client_quotas,
)
from penstock.metadata.security import QuotaEntity
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.quotas import (
    MATCH_DEFAULT,
    MATCH_EXACT,
    MATCH_SPECIFIED,
    AlterClientQuotasRequest,
    DescribeClientQuotasRequest,
    QuotaAlteration,
    QuotaFilterComponent,
    QuotaOp,
)
from tests.metadata.ensemble import Ensemble
from tests.metadata.test_features import told

USER_A: QuotaEntity = (("user", "a"),)
RATE = PRODUCER_BYTE_RATE


def op(key: str = RATE, value: float | None = 1000.0) -> QuotaOp:
    return QuotaOp(key=key, value=0.0 if value is None else value, remove=value is None)


def alteration(entity: Iterable[tuple[str, str | None]], *ops: QuotaOp) -> QuotaAlteration:
    parts = [QuotaEntityPart(entity_type=type, entity_name=name) for type, name in entity]
    return QuotaAlteration(entity=parts, ops=list(ops))


def alter(
    on: Ensemble, *entries: QuotaAlteration, validate_only: bool = False
) -> list[tuple[int, str | None]]:
    response = on.handle(AlterClientQuotasRequest(entries=list(entries), validate_only=validate_only), 1)
    assert [entry.entity for entry in response.entries] == [entry.entity for entry in entries]
    return [(entry.error_code, entry.error_message) for entry in response.entries]


def kept(on: Ensemble) -> Any:
    return on.on.image.security.quotas


def secured() -> Ensemble:
    """A cluster whose one broker reads quotas."""
    on = Ensemble(0)
    on.register(1, features=told(SUPPORTED_FEATURES))
    on.settle()
    return on


OK = [(ErrorCode.NONE, None)]


# Altering


def test_a_quota_is_set_changed_and_removed() -> None:
    on = secured()
    assert alter(on, alteration(USER_A, op(), op(REQUEST_PERCENTAGE, 12.5))) == OK
    assert kept(on) == {USER_A: {RATE: 1000.0, REQUEST_PERCENTAGE: 12.5}}
    assert alter(on, alteration(USER_A, op(value=2000.0), op(REQUEST_PERCENTAGE, None))) == OK
    assert kept(on) == {USER_A: {RATE: 2000.0}}
    assert alter(on, alteration(USER_A, op(value=None))) == OK
    assert kept(on) == {}


@pytest.mark.parametrize("written", ["2001:db8:0:0:0:0:0:7", "2001:DB8::7"])
def test_an_address_is_kept_as_brokers_see_it(written: str) -> None:
    """Otherwise its quota would limit nobody."""
    on = secured()
    key = CONNECTION_CREATION_RATE
    assert alter(on, alteration((("ip", written),), op(key, 5.0))) == OK
    assert kept(on) == {(("ip", "2001:db8::7"),): {key: 5.0}}
    component = QuotaFilterComponent(entity_type="ip", match_type=MATCH_EXACT, match=written)
    found = describe_client_quotas(DescribeClientQuotasRequest(components=[component]), kept(on))
    assert found.entries is not None and len(found.entries) == 1
    twice = [alteration((("ip", name),), op(key, 6.0)) for name in (written, "2001:db8::7")]
    assert [error for error, _ in alter(on, *twice)] == [ErrorCode.INVALID_REQUEST] * 2


def test_what_is_so_already_changes_nothing() -> None:
    on = secured()
    assert alter(on, alteration(USER_A, op())) == OK
    length = len(on.log)
    assert alter(on, alteration(USER_A, op(), op(REQUEST_PERCENTAGE, None))) == OK
    assert len(on.log) == length


def test_a_dry_run_checks_and_changes_nothing() -> None:
    on = secured()
    assert alter(on, alteration(USER_A, op()), validate_only=True) == OK
    ((error, _),) = alter(on, alteration(USER_A, op("nothing")), validate_only=True)
    assert error == ErrorCode.INVALID_REQUEST
    assert kept(on) == {}


@pytest.mark.parametrize(
    "entity",
    [
        [("user", "a")],
        [("user", None)],
        [("client-id", "a")],
        [("client-id", None)],
        [("user", "a"), ("client-id", "b")],
        [("user", "a"), ("client-id", None)],
        [("user", None), ("client-id", "b")],
        [("client-id", None), ("user", None)],
    ],
)
def test_users_and_client_ids_alone_and_together_may_have_quotas(
    entity: list[tuple[str, str | None]],
) -> None:
    on = secured()
    assert alter(on, alteration(entity, op(), op(CONTROLLER_MUTATION_RATE, 0.5))) == OK
    assert kept(on) == {tuple(sorted(entity)): {RATE: 1000.0, CONTROLLER_MUTATION_RATE: 0.5}}


@pytest.mark.parametrize("name", ["10.0.0.1", "fe80::1", None])
def test_an_address_may_have_a_rate_of_connections(name: str | None) -> None:
    on = secured()
    assert alter(on, alteration([("ip", name)], op(CONNECTION_CREATION_RATE, 5.0))) == OK
    assert kept(on) == {(("ip", name),): {CONNECTION_CREATION_RATE: 5.0}}


@pytest.mark.parametrize(
    ("entity", "ops", "message"),
    [
        ([], [op()], "An entity needs a user, a client-id or an ip."),
        ([("group", "a")], [op()], "There is no entity type 'group'. Types: user, client-id, ip."),
        ([("user", "a"), ("user", "b")], [op()], "An entity has one user."),
        ([("user", "")], [op()], "The name of a user must not be empty. The default has none (null)."),
        ([("user", "a" * (NAME_MAX + 1))], [op()], "The name of a user has at most 1000 characters."),
        (
            [("ip", "10.0.0.1"), ("user", "a")],
            [op(CONNECTION_CREATION_RATE, 1.0)],
            "An ip cannot be combined with a user or a client-id.",
        ),
        ([("ip", "localhost")], [op(CONNECTION_CREATION_RATE, 1.0)], "'localhost' is not an IP address."),
        (
            [("ip", "10.0.0.1")],
            [op()],
            "There is no quota 'producer_byte_rate' of this entity. Quotas: connection_creation_rate.",
        ),
        (
            [("user", "a")],
            [op(CONNECTION_CREATION_RATE, 1.0)],
            "There is no quota 'connection_creation_rate' of this entity. Quotas: producer_byte_rate, "
            "consumer_byte_rate, request_percentage, controller_mutation_rate.",
        ),
        ([("user", "a")], [op(), op()], "Each quota may be named once: producer_byte_rate."),
        ([("user", "a")], [op(value=0.0)], "producer_byte_rate must be greater than 0."),
        ([("user", "a")], [op(value=-1.0)], "producer_byte_rate must be greater than 0."),
        ([("user", "a")], [op(value=nan)], "producer_byte_rate must be greater than 0."),
        ([("user", "a")], [op(value=inf)], "producer_byte_rate must be greater than 0."),
        ([("user", "a")], [op(value=1.5)], "producer_byte_rate must be a whole number."),
        ([("user", "a")], [op(value=1e19)], "producer_byte_rate is at most 9223372036854775807."),
    ],
)
def test_what_makes_no_sense_is_refused(
    entity: list[tuple[str, str | None]], ops: list[QuotaOp], message: str
) -> None:
    on = secured()
    assert alter(on, alteration(entity, *ops)) == [(ErrorCode.INVALID_REQUEST, message)]
    assert kept(on) == {}


def test_each_entity_of_a_request_succeeds_or_fails_alone() -> None:
    on = secured()
    bad = alteration([("user", "b")], op(), op("nothing"))
    (refused, _), (accepted, _) = alter(on, bad, alteration(USER_A, op()))
    assert (refused, accepted) == (ErrorCode.INVALID_REQUEST, ErrorCode.NONE)
    assert kept(on) == {USER_A: {RATE: 1000.0}}


def test_an_entity_that_is_named_twice_is_refused_in_any_order() -> None:
    on = secured()
    both = [("user", "a"), ("client-id", "b")]
    results = alter(on, alteration(both, op()), alteration(both[::-1], op(value=5.0)))
    assert results == [(ErrorCode.INVALID_REQUEST, "Each entity may be named once.")] * 2
    assert kept(on) == {}


def test_the_number_of_entities_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "ENTITIES_MAX", 2)
    on = secured()
    entries = [alteration([("user", name)], op()) for name in "abc"]
    assert [error for error, _ in alter(on, *entries)] == [0, 0, ErrorCode.INVALID_REQUEST]
    assert len(kept(on)) == 2
    assert alter(on, alteration([("user", "a")], op(value=7.0))) == OK


def test_no_quota_is_written_before_every_broker_reads_them() -> None:
    on = Ensemble()
    ((error, message),) = alter(on, alteration(USER_A, op()))
    assert error == ErrorCode.UNSUPPORTED_VERSION
    assert message is not None and "penstock.security" in message
    assert kept(on) == {}


def test_quotas_outlive_a_controller() -> None:
    on = secured()
    assert alter(on, alteration(USER_A, op())) == OK
    on.fail_over()
    assert kept(on) == {USER_A: {RATE: 1000.0}}


# Describing

ENTITIES: list[QuotaEntity] = [
    (("user", "a"),),
    (("user", None),),
    (("client-id", "c"),),
    (("client-id", "c"), ("user", "a")),
    (("client-id", None), ("user", "a")),
    (("ip", "10.0.0.1"),),
    (("ip", None),),
]
KNOWN: dict[QuotaEntity, dict[str, float]] = {entity: {RATE: 1.0} for entity in ENTITIES}


def described(*components: tuple[str, int, str | None], strict: bool = False) -> list[QuotaEntity]:
    request = DescribeClientQuotasRequest(
        components=[
            QuotaFilterComponent(entity_type=type, match_type=kind, match=name)
            for type, kind, name in components
        ],
        strict=strict,
    )
    response = describe_client_quotas(request, KNOWN)
    assert response.error_code == ErrorCode.NONE and response.entries is not None
    assert all(
        [(value.key, value.value) for value in entry.values] == [(RATE, 1.0)] for entry in response.entries
    )
    return [
        tuple((part.entity_type, part.entity_name) for part in entry.entity) for entry in response.entries
    ]


def test_without_a_filter_everything_is_described_and_strictly_nothing() -> None:
    assert described() == ENTITIES
    assert described(strict=True) == []


def test_filters_match_a_name_the_default_or_any() -> None:
    assert described(("user", MATCH_EXACT, "a")) == [ENTITIES[0], ENTITIES[3], ENTITIES[4]]
    assert described(("user", MATCH_EXACT, "a"), strict=True) == [ENTITIES[0]]
    assert described(("user", MATCH_DEFAULT, None)) == [ENTITIES[1]]
    assert described(("user", MATCH_SPECIFIED, None), strict=True) == ENTITIES[:2]
    assert described(("ip", MATCH_SPECIFIED, None)) == ENTITIES[5:]
    both = (("user", MATCH_SPECIFIED, None), ("client-id", MATCH_DEFAULT, None))
    assert described(*both) == described(*both, strict=True) == [ENTITIES[4]]


@pytest.mark.parametrize(
    ("components", "error"),
    [
        ([("", MATCH_EXACT, "a")], ErrorCode.INVALID_REQUEST),
        ([("group", MATCH_EXACT, "a")], ErrorCode.UNSUPPORTED_VERSION),
        ([("user", MATCH_EXACT, None)], ErrorCode.INVALID_REQUEST),
        ([("user", MATCH_DEFAULT, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", MATCH_SPECIFIED, "a")], ErrorCode.INVALID_REQUEST),
        ([("user", 9, None)], ErrorCode.INVALID_REQUEST),
        ([("user", MATCH_EXACT, "a"), ("user", MATCH_DEFAULT, None)], ErrorCode.INVALID_REQUEST),
        ([("user", MATCH_EXACT, "a"), ("ip", MATCH_DEFAULT, None)], ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(
    components: list[tuple[str, int, str | None]], error: ErrorCode
) -> None:
    request = DescribeClientQuotasRequest(
        components=[
            QuotaFilterComponent(entity_type=type, match_type=kind, match=name)
            for type, kind, name in components
        ]
    )
    response = describe_client_quotas(request, KNOWN)
    assert (response.error_code, response.entries) == (error, None)
