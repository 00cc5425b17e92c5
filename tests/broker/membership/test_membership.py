"""The lease of a broker: never longer than the session of the controller that gave it; and its features."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.config import BrokerConfig
from penstock.broker.membership.membership import Membership, State, registered_text
from penstock.metadata.features import SUPPORTED_FEATURES
from penstock.metadata.image import BrokerImage, Endpoint, Image
from penstock.metadata.values import FeatureRange
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
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


class Features:
    """A broker with an image and nothing else, to see which features it reports."""

    EPOCH = 7

    def __init__(
        self, levels: dict[str, int], registered: tuple[FeatureRange, ...], epoch: int = EPOCH
    ) -> None:
        self.failures: list[str] = []
        known = BrokerImage(BrokerId(1), epoch, bytes(16), (), None, False, False, (), registered)
        consensus: Any = SimpleNamespace(image=Image(features=levels, brokers={known.id: known}))
        logger: Any = SimpleNamespace(warning=lambda event, **values: None)
        config, _ = BrokerConfig.load({})
        unused: Any = None
        self.membership = Membership(
            unused,
            config,
            logger,
            unused,
            unused,
            unused,
            consensus,
            unused,
            node_id=1,
            rack=None,
            prepare_partitions=lambda then: None,
            on_active=lambda: None,
            on_failure=self.failures.append,
        )
        self.membership.epoch = self.EPOCH

    def reported(self) -> list[str]:
        return [feature.name for feature in self.membership._unregistered_features()]


def test_a_broker_reports_its_features_while_its_registration_has_others() -> None:
    names = [each.name for each in SUPPORTED_FEATURES]
    assert Features({}, ()).reported() == names
    assert Features({}, SUPPORTED_FEATURES[:1]).reported() == names
    assert Features({}, SUPPORTED_FEATURES).reported() == []
    assert Features({}, (), epoch=Features.EPOCH - 1).reported() == [], "the registration is on its way"


def test_a_broker_that_is_refused_for_a_level_says_which_one() -> None:
    stage = Features({"metadata.version": 25, "transaction.version": 3}, ())
    stage.membership._refused(ErrorCode.UNSUPPORTED_VERSION)
    assert stage.failures == [
        "the cluster uses level 3 of transaction.version, which this release does not support; install a newer "
        "release"
    ]


def test_a_broker_that_is_refused_before_it_knows_the_level_tries_again() -> None:
    stage = Features({"metadata.version": 25}, ())
    stage.membership._refused(ErrorCode.UNSUPPORTED_VERSION)
    assert stage.failures == []
