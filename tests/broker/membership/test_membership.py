"""The lease of a broker: never longer than the session of the controller that gave it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.membership.membership import Membership, State, registered_text
from penstock.metadata.image import Endpoint
from penstock.protocol.listeners import CLIENTS
from penstock.protocol.messages.brokers import BrokerHeartbeatResponse

OWN_LEASE_MS = 6_000


class Clock:
    ms = 0

    def now_ms(self) -> int:
        return self.ms


class Stage:
    """An active broker with the default settings: a session of 9 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        config, _ = BrokerConfig.load({})
        environment: Any = SimpleNamespace(clock=self.clock)
        unused: Any = None
        self.membership = Membership(
            environment,
            config,
            *[unused] * 6,
            node_id=1,
            rack=None,
            prepare_partitions=lambda then: None,
            on_active=lambda: None,
            on_failure=lambda reason: None,
        )
        self.membership.state = State.ACTIVE

    def lease_ms(self, session_ms: int) -> int:
        """How long a heartbeat that was just sent is worth, answered with this session."""
        sent_ms = self.clock.ms
        answer = BrokerHeartbeatResponse(is_fenced=False, session_timeout_ms=session_ms)
        self.membership._heard(answer, sent_ms)
        while self.membership.is_serving():
            self.clock.ms += 1
        return self.clock.ms - sent_ms


@pytest.mark.parametrize(("session_ms", "lease_ms"), [(3_000, 2_000), (9_000, 6_000), (30_000, 20_000)])
def test_the_lease_goes_by_the_session_that_the_controller_names(session_ms: int, lease_ms: int) -> None:
    assert Stage().lease_ms(session_ms) == lease_ms


def test_a_controller_that_names_none_is_taken_to_have_the_setting_of_this_broker() -> None:
    assert Stage().lease_ms(0) == OWN_LEASE_MS


def test_another_controller_names_another_session() -> None:
    stage = Stage()
    assert [stage.lease_ms(session_ms) for session_ms in (9_000, 3_000, 9_000)] == [6_000, 2_000, 6_000]


def test_a_short_lease_does_not_end_between_two_heartbeats() -> None:
    stage = Stage()
    assert stage.membership._interval_ms <= OWN_LEASE_MS // 2
    stage.lease_ms(3_000)
    assert stage.membership._interval_ms <= 1_000


def test_what_was_registered_reads_the_same_in_every_version() -> None:
    """Otherwise a broker killed while it registers is not recognised after an upgrade."""
    endpoint = Endpoint(CLIENTS.name, "host", 9092, CLIENTS.security_protocol)
    assert registered_text([endpoint], "a", [bytes(2)]) == (
        "([Endpoint(name='PLAINTEXT', host='host', port=9092, security_protocol=0)], 'a', ['0000'])"
    )
