"""The core of client quotas: which quota applies to whom, and what a token bucket lets through."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.network import quotas as core
from penstock.broker.network.quotas import BURST_S, DEBT_S, Bucket, ClientQuotas
from penstock.metadata.quotas import (
    CLIENT_ID,
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    NAME_MAX,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    USER,
)

KEY = PRODUCER_BYTE_RATE


def entity(user: Any = ..., client_id: Any = ...) -> Any:
    parts = [(CLIENT_ID, client_id)] if client_id is not ... else []
    return tuple(parts + ([(USER, user)] if user is not ... else []))


# Kafka's order, the strongest first, with who shares the usage.
LEVELS = (
    (entity("u", "c"), ("u", "c")),
    (entity("u", None), ("u", "c")),
    (entity("u"), ("u", None)),
    (entity(None, "c"), ("u", "c")),
    (entity(None, None), ("u", "c")),
    (entity(None), ("u", None)),
    (entity(client_id="c"), (None, "c")),
    (entity(client_id=None), (None, "c")),
)


def table(values: dict[Any, dict[str, float]], now_ms: int = 0) -> ClientQuotas:
    quotas = ClientQuotas()
    quotas.apply(values, now_ms)
    return quotas


# Which quota applies


def test_the_first_level_that_has_the_quota_applies() -> None:
    for present in itertools.product((False, True), repeat=8):
        chosen = [(level, number) for number, (level, is_in) in enumerate(zip(LEVELS, present)) if is_in]
        quotas = table({each: {KEY: 100.0 + number} for (each, _), number in chosen})
        found = quotas.find(KEY, "u", "c", 0)
        if not chosen:
            assert found is None
            continue
        (_, shared), number = chosen[0]
        assert found is not None
        assert (found.rate, found.key) == (100.0 + number, (KEY, *shared)), present
        quotas.check()


def test_quotas_of_others_do_not_apply() -> None:
    quotas = table({entity("v", "c"): {KEY: 1.0}, entity("v"): {KEY: 1.0}, entity(client_id="d"): {KEY: 1.0}})
    assert quotas.find(KEY, "u", "c", 0) is None
    assert quotas.find(CONSUMER_BYTE_RATE, "v", "c", 0) is None


def test_each_quota_is_looked_up_by_itself() -> None:
    quotas = table({entity("u", "c"): {KEY: 1.0}, entity(None): {CONSUMER_BYTE_RATE: 2.0}})
    found = quotas.find(CONSUMER_BYTE_RATE, "u", "c", 0)
    assert found is not None and found.rate == 2.0


def test_connections_of_a_user_share_its_quota_and_those_of_another_user_have_their_own() -> None:
    quotas = table({entity(None): {KEY: 10.0}})
    found = quotas.find(KEY, "u", "c", 0)
    assert found is quotas.find(KEY, "u", "d", 0)
    assert found is not quotas.find(KEY, "v", "c", 0)


def test_a_percentage_is_of_the_time_of_the_loop() -> None:
    found = table({entity("u"): {REQUEST_PERCENTAGE: 2.5}}).find(REQUEST_PERCENTAGE, "u", "c", 0)
    assert found is not None and found.rate == 25.0


@pytest.mark.parametrize("address", ["10.0.0.1", "::ffff:10.0.0.1"])
def test_connections_are_counted_by_address_or_with_the_default(address: str) -> None:
    key = CONNECTION_CREATION_RATE
    quotas = table({((IP, "10.0.0.1"),): {key: 5.0}, ((IP, None),): {key: 7.0}})
    found, other = quotas.find_address(address, 0), quotas.find_address("10.0.0.2", 0)
    assert found is not None and found.rate == 5.0
    assert other is not None and other.rate == 7.0
    assert table({}).find_address(address, 0) is None


def test_a_long_client_id_is_not_kept_as_it_is() -> None:
    """A client can invent as many as there are buckets, of 32 KB each."""
    quotas = table({((CLIENT_ID, None), (USER, "u")): {KEY: 1.0}, entity("u", "c" * NAME_MAX): {KEY: 2.0}})
    found = quotas.find(KEY, "u", "c" * 32_000, 0)
    assert found is not None and found.rate == 1.0
    assert sum(len(part or "") for part in found.key) < 2 * NAME_MAX
    quotas.check()
    longest = quotas.find(KEY, "u", "c" * NAME_MAX, 0)
    assert longest is not None and longest.rate == 2.0


# Token buckets


def bucket(rate: float, key: str = KEY) -> Bucket:
    return Bucket((key, "u", None), rate, 0)


def test_a_burst_is_not_delayed_and_a_debt_is_until_it_is_paid() -> None:
    used = bucket(1000)
    used.charge(1000, 0)
    assert used.delay_ms(0) == 0
    used.charge(500, 0)
    assert used.delay_ms(0) == 501
    assert used.delay_ms(400) == 101
    assert used.delay_ms(501) == 0


def test_an_idle_client_does_not_save_up_more_than_a_burst() -> None:
    used = bucket(1000)
    assert used.level(3_600_000) == 1000
    mutations = bucket(10, CONTROLLER_MUTATION_RATE)
    assert mutations.level(3_600_000) == 110


def test_a_clock_that_steps_back_pays_nothing_twice() -> None:
    used = bucket(1000)
    used.charge(3000, 10_000)
    assert used.delay_ms(10_000) == 2001
    assert used.delay_ms(5_000) == 2001
    assert used.delay_ms(6_000) == 1001
    # And a long sleep pays everything, but no more than that.
    assert used.level(10**9) == 1000


def test_a_debt_is_limited() -> None:
    used = bucket(10)
    used.charge(10**9, 0)
    assert used.delay_ms(0) == DEBT_S * 1000 + 1
    used.check()


@pytest.mark.parametrize(("rate", "delay_ms"), [(2000.0, 501), (500.0, 2001)])
def test_a_debt_takes_another_time_to_pay_at_another_rate(rate: float, delay_ms: int) -> None:
    quotas = table({entity("u"): {KEY: 1000.0}})
    found = quotas.find(KEY, "u", "c", 0)
    assert found is not None
    found.charge(2000, 0)
    quotas.apply({entity("u"): {KEY: rate}}, 0)
    assert quotas.find(KEY, "u", "c", 0) is found
    assert found.delay_ms(0) == delay_ms
    quotas.check()


def test_a_quota_that_is_removed_is_forgotten_with_its_debt() -> None:
    quotas = table({entity("u"): {KEY: 1000.0}})
    found = quotas.find(KEY, "u", "c", 0)
    assert found is not None
    found.charge(5000, 0)
    quotas.apply({}, 0)
    assert not found.is_kept and not len(quotas)
    quotas.apply({entity("u"): {KEY: 1000.0}}, 0)
    again = quotas.find(KEY, "u", "c", 0)
    assert again is not None and again.delay_ms(0) == 0


def test_invented_client_ids_use_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BUCKETS_MAX", 50)
    quotas = table({entity(client_id=None): {KEY: 1000.0}, ((IP, None),): {CONNECTION_CREATION_RATE: 1.0}})
    used = quotas.find(KEY, "u", "busy", 0)
    assert used is not None
    used.charge(9000, 0)
    for number in range(500):
        quotas.find(KEY, "u", f"invented-{number}", number)
        quotas.find_address(f"10.0.{number}.1", number)
        quotas.touch(used)
    assert len(quotas) == 50
    # The one in use was kept, with its debt.
    assert quotas.find(KEY, "u", "busy", 0) is used and used.is_kept
    quotas.check()


@given(
    rate=st.floats(1, 10_000),
    costs=st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 20_000)), min_size=1, max_size=60),
)
def test_over_any_time_a_connection_is_served_its_quota_a_burst_and_one_request(
    rate: float, costs: list[tuple[int, float]]
) -> None:
    """The connection pauses, sends, and waits out each delay."""
    used = bucket(rate)
    now_ms = 0
    served: list[tuple[int, float]] = []
    for pause_ms, wanted in costs:
        now_ms += pause_ms
        # Larger requests are limited: their debt takes longer than the longest delay.
        cost = min(wanted, rate * (DEBT_S - BURST_S))
        served.append((now_ms, cost))
        used.charge(cost, now_ms)
        used.check()
        now_ms += used.delay_ms(now_ms)
    for first, (begin_ms, _) in enumerate(served):
        total = 0.0
        for end_ms, cost in served[first:]:
            total += cost
            paid = rate * (end_ms - begin_ms) / 1000
            assert total <= paid + used.burst + cost + 1e-6 * total + rate / 1000


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 3), st.floats(0, 10_000)),
            st.tuples(st.just("set"), st.integers(0, 7), st.one_of(st.none(), st.floats(1, 10_000))),
            st.tuples(st.just("wait"), st.integers(-2_000, 60_000), st.none()),
        ),
        max_size=60,
    )
)
def test_quotas_may_change_at_any_time_and_clocks_may_jump(
    steps: list[tuple[str, int, float | None]],
) -> None:
    clients = [("u", "c"), ("u", "d"), ("v", "c"), ("v", "d")]
    quotas = ClientQuotas()
    values: dict[Any, dict[str, float]] = {}
    now_ms = 10_000
    for what, number, amount in steps:
        if what == "wait":
            now_ms = max(0, now_ms + number)
        elif what == "set":
            level = LEVELS[number][0]
            values = {each: value for each, value in values.items() if each != level}
            if amount is not None:
                values[level] = {KEY: amount}
            quotas.apply(values, now_ms)
        else:
            found = quotas.find(KEY, *clients[number], now_ms)
            if found is not None:
                found.charge(amount or 0, now_ms)
                assert 0 <= found.delay_ms(now_ms) <= DEBT_S * 1000 + 1
        quotas.check()
