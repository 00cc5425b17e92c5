"""Changing settings: AlterConfigs and IncrementalAlterConfigs."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.decision import Decision
from penstock.metadata.alterations import Operation
from penstock.metadata.controller import Controller
from penstock.metadata.features import COMPACTION
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, ConfigResource, Image, config_record
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.metadata_records import FeatureLevelRecord
from penstock.protocol.schema import Message
from tests.metadata.test_image import broker, topic

SET, DELETE, APPEND, SUBTRACT = Operation

Change = tuple[int, str, str | None]


def controller(brokers: int = 1, compaction: int = 0) -> Controller:
    """``compaction`` is the level of this feature."""
    registered = [broker(id) for id in range(1, brokers + 1)]
    levels = [FeatureLevelRecord(name=COMPACTION, feature_level=compaction)] if compaction else []
    image, _ = Image().apply(
        [*levels, *registered, *topic("a", 1), *topic("b", 2), *topic(CONSUMER_OFFSETS, 3)]
    )
    return Controller(image, random=Random(1), broker=1, static={})


def alter(
    on: Controller, *changes: Change, type: int = TOPIC_RESOURCE, name: str = "a", validate_only: bool = False
) -> Decision[Message]:
    resource = IncrementalAlterConfigsResource(
        resource_type=type,
        resource_name=name,
        configs=[
            IncrementalAlterableConfig(name=key, config_operation=operation, value=value)
            for operation, key, value in changes
        ],
    )
    request = IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate_only)
    before = on.image
    decision = on.handle(request, 1, 0)
    on.image.check()
    (response,) = decision.response.responses
    if response.error_code:
        assert on.image is before and decision.changes == []
    return decision


def replace(
    on: Controller, configs: Mapping[str, str | None], type: int = TOPIC_RESOURCE, name: str = "a"
) -> Decision[Message]:
    resource = AlterConfigsResource(
        resource_type=type,
        resource_name=name,
        configs=[AlterableConfig(name=key, value=value) for key, value in configs.items()],
    )
    decision = on.handle(AlterConfigsRequest(resources=[resource]), 2, 0)
    on.image.check()
    return decision


def error_of(decision: Decision[Message]) -> ErrorCode:
    response: AlterConfigsResourceResponse
    (response,) = decision.response.responses
    return ErrorCode(response.error_code)


def test_settings_are_set_and_deleted() -> None:
    on = controller()
    assert error_of(alter(on, (SET, "retention.ms", "1"), (SET, "segment.ms", "2"))) is ErrorCode.NONE
    assert on.image.topic_config("a") == {"retention.ms": "1", "segment.ms": "2"}
    assert error_of(alter(on, (DELETE, "retention.ms", None), (SET, "segment.ms", "3"))) is ErrorCode.NONE
    assert on.image.topic_config("a") == {"segment.ms": "3"}
    assert on.image.topic_config("b") == {}


def test_what_is_set_already_needs_no_change() -> None:
    on = controller()
    alter(on, (SET, "retention.ms", "1"))
    decision = alter(on, (SET, "retention.ms", "1"), (DELETE, "segment.ms", None))
    assert error_of(decision) is ErrorCode.NONE
    assert decision.changes == []


def test_lists_grow_and_shrink_from_their_default() -> None:
    on = controller()
    alter(on, (APPEND, "cleanup.policy", "compact"), name=CONSUMER_OFFSETS)
    assert on.image.topic_config(CONSUMER_OFFSETS) == {"cleanup.policy": "delete,compact"}
    alter(on, (APPEND, "cleanup.policy", "compact,delete"), name=CONSUMER_OFFSETS)
    assert on.image.topic_config(CONSUMER_OFFSETS) == {"cleanup.policy": "delete,compact"}
    alter(on, (SUBTRACT, "cleanup.policy", "delete"), name=CONSUMER_OFFSETS)
    assert on.image.topic_config(CONSUMER_OFFSETS) == {"cleanup.policy": "compact"}


def test_only_lists_can_grow() -> None:
    assert error_of(alter(controller(), (APPEND, "retention.ms", "1"))) is ErrorCode.INVALID_CONFIG


@pytest.mark.parametrize("change", [(SET, "cleanup.policy", "delete"), (DELETE, "cleanup.policy", None)])
def test_an_internal_topic_stays_compacted(change: Change) -> None:
    on = controller()
    for allowed in ((SET, "cleanup.policy", "compact"), (SET, "segment.bytes", "1048576")):
        assert not alter(on, allowed, name=CONSUMER_OFFSETS).response.responses[0].error_code
    refused = alter(on, change, name=CONSUMER_OFFSETS).response.responses[0]
    assert refused.error_code == ErrorCode.INVALID_CONFIG and "always compact" in refused.error_message


# Compaction, which every broker has to understand.


COMPACT_CHANGES: list[Change] = [
    (SET, "cleanup.policy", "compact"),
    (SET, "cleanup.policy", "delete, compact"),
    (APPEND, "cleanup.policy", "compact"),
]


@pytest.mark.parametrize("change", COMPACT_CHANGES, ids=str)
def test_a_topic_is_not_compacted_before_every_broker_is_upgraded(change: Change) -> None:
    on = controller()
    refused = alter(on, change).response.responses[0]
    assert refused.error_code == ErrorCode.INVALID_CONFIG
    assert "once all brokers have been upgraded" in refused.error_message
    assert error_of(replace(on, {"cleanup.policy": "compact"})) is ErrorCode.INVALID_CONFIG
    assert on.image.topic_config("a") == {}


@pytest.mark.parametrize("change", COMPACT_CHANGES, ids=str)
def test_a_topic_is_switched_between_compact_and_delete(change: Change) -> None:
    on = controller(compaction=1)
    assert error_of(alter(on, change)) is ErrorCode.NONE
    assert "compact" in on.image.topic_config("a")["cleanup.policy"]
    assert error_of(alter(on, (SET, "cleanup.policy", "delete"))) is ErrorCode.NONE
    assert on.image.topic_config("a") == {"cleanup.policy": "delete"}
    assert error_of(replace(on, {"cleanup.policy": "compact"})) is ErrorCode.NONE
    assert error_of(alter(on, (DELETE, "cleanup.policy", None))) is ErrorCode.NONE
    assert on.image.topic_config("a") == {}


@pytest.mark.parametrize("name", ["", "1"])
def test_compaction_does_not_become_a_default_before_every_broker_is_upgraded(name: str) -> None:
    change: Change = (SET, "log.cleanup.policy", "compact,delete")
    refused = alter(controller(), change, type=BROKER_RESOURCE, name=name).response.responses[0]
    assert refused.error_code == ErrorCode.INVALID_CONFIG
    assert refused.error_message.startswith("log.cleanup.policy=compact,delete: topics can be compacted once")
    on = controller(compaction=1)
    assert error_of(alter(on, change, type=BROKER_RESOURCE, name=name)) is ErrorCode.NONE


def test_other_policies_and_other_settings_need_no_upgrade() -> None:
    on = controller()
    for change in ((SET, "cleanup.policy", "delete"), (SET, "cleanup.policy", "")):
        assert error_of(alter(on, change)) is ErrorCode.NONE
    assert error_of(alter(on, (SET, "min.cleanable.dirty.ratio", "0.1"))) is ErrorCode.NONE


def test_validation_alone_changes_nothing() -> None:
    on = controller()
    before = on.image
    assert error_of(alter(on, (SET, "retention.ms", "1"), validate_only=True)) is ErrorCode.NONE
    assert error_of(alter(on, (SET, "retention.ms", "x"), validate_only=True)) is ErrorCode.INVALID_CONFIG
    assert on.image is before


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([(SET, "retention.ms", "never")], ErrorCode.INVALID_CONFIG),
        ([(SET, "nonsense", "1")], ErrorCode.INVALID_CONFIG),
        ([(APPEND, "nonsense", "1")], ErrorCode.INVALID_CONFIG),
        ([(SET, "cleanup.policy", "compress")], ErrorCode.INVALID_CONFIG),
        ([(APPEND, "cleanup.policy", "compress")], ErrorCode.INVALID_CONFIG),
        ([(SET, "compression.type", "gzip")], ErrorCode.INVALID_CONFIG),
        ([(SET, "penstock.created.ms", "1")], ErrorCode.INVALID_CONFIG),
        (
            [(SET, "min.compaction.lag.ms", "9"), (SET, "max.compaction.lag.ms", "8")],
            ErrorCode.INVALID_CONFIG,
        ),
        ([(SET, "retention.ms", None)], ErrorCode.INVALID_REQUEST),
        ([(APPEND, "cleanup.policy", None)], ErrorCode.INVALID_REQUEST),
        ([(4, "retention.ms", "1")], ErrorCode.INVALID_REQUEST),
        ([(-1, "retention.ms", "1")], ErrorCode.INVALID_REQUEST),
        ([(SET, "retention.ms", "1"), (DELETE, "retention.ms", None)], ErrorCode.INVALID_REQUEST),
        # One bad setting spoils the resource.
        ([(SET, "segment.ms", "5"), (SET, "retention.ms", "x")], ErrorCode.INVALID_CONFIG),
    ],
    ids=str,
)
def test_changes_that_cannot_be_are_refused(changes: list[Change], error: ErrorCode) -> None:
    assert error_of(alter(controller(), *changes)) is error


@pytest.mark.parametrize(
    ("type", "name", "error"),
    [
        (TOPIC_RESOURCE, "missing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC_RESOURCE, "", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (TOPIC_RESOURCE, "a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (BROKER_RESOURCE, "2", ErrorCode.INVALID_REQUEST),
        (BROKER_RESOURCE, "01", ErrorCode.INVALID_REQUEST),
        (BROKER_RESOURCE, "x", ErrorCode.INVALID_REQUEST),
        (8, "1", ErrorCode.INVALID_REQUEST),
        (0, "a", ErrorCode.INVALID_REQUEST),
    ],
)
def test_resources_that_are_not_there_are_refused(type: int, name: str, error: ErrorCode) -> None:
    assert error_of(alter(controller(), (SET, "retention.ms", "1"), type=type, name=name)) is error
    assert error_of(replace(controller(), {"retention.ms": "1"}, type, name)) is error


def test_setting_that_is_no_longer_known_can_be_deleted_and_does_not_stand_in_the_way() -> None:
    on = controller()
    on.apply([config_record(ConfigResource(TOPIC_RESOURCE, "a"), "of.an.older.release", "1")])
    assert error_of(alter(on, (SET, "retention.ms", "1"))) is ErrorCode.NONE
    assert error_of(alter(on, (DELETE, "of.an.older.release", None))) is ErrorCode.NONE
    assert on.image.topic_config("a") == {"retention.ms": "1"}


@pytest.mark.parametrize("name", ["1", ""])
def test_dynamic_settings_of_one_or_all_brokers_are_set(name: str) -> None:
    on = controller()
    assert (
        error_of(alter(on, (SET, "log.retention.ms", "5"), type=BROKER_RESOURCE, name=name)) is ErrorCode.NONE
    )
    assert on.image.broker_config(1 if name else None) == {"log.retention.ms": "5"}
    replace(on, {"message.max.bytes": "6"}, BROKER_RESOURCE, name)
    assert on.image.broker_config(1 if name else None) == {"message.max.bytes": "6"}


def test_the_throttles_of_kafkas_reassignment_tool_are_set_and_taken_away() -> None:
    on = controller()
    rates = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
    throttle = alter(on, *((SET, rate, "1000000") for rate in rates), type=BROKER_RESOURCE, name="1")
    assert error_of(throttle) is ErrorCode.NONE
    clear = alter(on, *((DELETE, rate, None) for rate in rates), type=BROKER_RESOURCE, name="1")
    assert error_of(clear) is ErrorCode.NONE


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("num.partitions", "5", ErrorCode.INVALID_REQUEST),
        ("node.id", "5", ErrorCode.INVALID_REQUEST),
        ("nonsense", "5", ErrorCode.INVALID_CONFIG),
        ("retention.ms", "5", ErrorCode.INVALID_CONFIG),
        ("log.retention.ms", "x", ErrorCode.INVALID_CONFIG),
        ("compression.type", "zstd", ErrorCode.INVALID_CONFIG),
        # Nobody on the network names files, URLs, classes or variables: CVE-2023-25194, CVE-2024-31141,
        # CVE-2025-27817, CVE-2025-27818, CVE-2025-27819.
        ("ssl.keystore.location", "/etc/passwd", ErrorCode.INVALID_REQUEST),
        ("listener.name.ssl.ssl.truststore.location", "/etc/passwd", ErrorCode.INVALID_REQUEST),
        ("penstock.internal.secret.file", "/etc/passwd", ErrorCode.INVALID_REQUEST),
        ("sasl.oauthbearer.jwks.endpoint.url", "file:///etc/passwd", ErrorCode.INVALID_REQUEST),
        ("sasl.oauthbearer.allowed.urls", "https://a", ErrorCode.INVALID_REQUEST),
        ("authorizer.class.name", "java.lang.Runtime", ErrorCode.INVALID_REQUEST),
        (
            "sasl.jaas.config",
            "com.sun.security.auth.module.JndiLoginModule required;",
            ErrorCode.INVALID_REQUEST,
        ),
        ("config.providers", "file", ErrorCode.INVALID_REQUEST),
        ("log.retention.ms", "${file:/etc/passwd:root}", ErrorCode.INVALID_CONFIG),
        ("log.retention.ms", "${env:HOME}", ErrorCode.INVALID_CONFIG),
    ],
)
def test_other_settings_of_brokers_are_refused(setting: str, value: str, error: ErrorCode) -> None:
    decision = alter(controller(), (SET, setting, value), type=BROKER_RESOURCE, name="1")
    assert error_of(decision) is error


def test_what_kafka_changes_while_it_runs_and_has_no_effect_here_is_refused_with_the_reason() -> None:
    decision = alter(controller(), (SET, "num.io.threads", "5"), type=BROKER_RESOURCE, name="1")
    assert error_of(decision) is ErrorCode.INVALID_REQUEST
    (result,) = decision.response.responses
    assert "no effect here: one event loop" in result.error_message


def test_replacing_removes_what_is_not_named() -> None:
    on = controller()
    alter(on, (SET, "retention.ms", "1"), (SET, "segment.ms", "2"))
    assert error_of(replace(on, {"segment.ms": "3", "flush.ms": "4"})) is ErrorCode.NONE
    assert on.image.topic_config("a") == {"segment.ms": "3", "flush.ms": "4"}
    replace(on, {})
    assert on.image.topic_config("a") == {}


@pytest.mark.parametrize(
    ("configs", "error"),
    [({"retention.ms": None}, ErrorCode.INVALID_REQUEST), ({"nonsense": "1"}, ErrorCode.INVALID_CONFIG)],
)
def test_replacements_that_cannot_be_are_refused(configs: dict[str, str | None], error: ErrorCode) -> None:
    on = controller()
    alter(on, (SET, "segment.ms", "2"))
    assert error_of(replace(on, configs)) is error
    assert on.image.topic_config("a") == {"segment.ms": "2"}


def test_resources_of_one_request_do_not_depend_on_each_other() -> None:
    on = controller()
    resources = [
        AlterConfigsResource(resource_type=TOPIC_RESOURCE, resource_name=name, configs=configs)
        for name, configs in {
            "a": [AlterableConfig(name="retention.ms", value="x")],
            "b": [AlterableConfig(name="retention.ms", value="1")],
        }.items()
    ]
    decision = on.handle(AlterConfigsRequest(resources=resources), 2, 0)
    assert [response.error_code for response in decision.response.responses] == [ErrorCode.INVALID_CONFIG, 0]
    assert on.image.topic_config("b") == {"retention.ms": "1"}


def test_resource_named_twice_is_refused_both_times() -> None:
    on = controller()
    resources = [
        AlterConfigsResource(
            resource_type=TOPIC_RESOURCE,
            resource_name="a",
            configs=[AlterableConfig(name="retention.ms", value=value)],
        )
        for value in "12"
    ]
    decision = on.handle(AlterConfigsRequest(resources=resources), 2, 0)
    errors = [response.error_code for response in decision.response.responses]
    assert errors == [ErrorCode.INVALID_REQUEST] * 2 and decision.changes == []


NAMES = st.sampled_from(["retention.ms", "segment.ms", "flush.ms"])
VALUES = st.sampled_from(["1", "2", "x", None])
STEPS = st.one_of(
    st.tuples(
        st.just("alter"), st.lists(st.tuples(st.sampled_from([SET, DELETE]), NAMES, VALUES), max_size=3)
    ),
    st.tuples(st.just("replace"), st.dictionaries(NAMES, VALUES, max_size=3)),
)


@given(st.lists(STEPS, max_size=10))
@settings(max_examples=80, deadline=None)
def test_settings_agree_with_a_naive_model(steps: list[tuple[str, object]]) -> None:
    on = controller()
    model: dict[str, str] = {}
    for kind, step in steps:
        after: dict[str, str | None]
        if kind == "alter":
            assert isinstance(step, list)
            decision = alter(on, *step)
            after = {**model, **{name: None if op == DELETE else value for op, name, value in step}}
            named = [name for _, name, _ in step]
            is_bad = len(named) != len(set(named)) or any(
                op == SET and value in ("x", None) for op, _, value in step
            )
        else:
            assert isinstance(step, dict)
            decision = replace(on, step)
            after = dict(step)
            is_bad = any(value in ("x", None) for value in step.values())
        assert (error_of(decision) is not ErrorCode.NONE) == is_bad
        if not is_bad:
            model = {name: value for name, value in after.items() if value is not None}
        assert on.image.topic_config("a") == model


def test_trap_7_a_cluster_keeps_its_one_min_insync_replicas() -> None:
    on = controller(brokers=2)
    everyone: Any = {"type": BROKER_RESOURCE, "name": ""}
    alter(on, (SET, MIN_ISR, "2"), **everyone)
    assert error_of(alter(on, (DELETE, MIN_ISR, None), **everyone)) is ErrorCode.INVALID_CONFIG
    # AlterConfigs removes what it does not name.
    assert error_of(replace(on, {"log.retention.ms": "1000"}, **everyone)) is ErrorCode.INVALID_CONFIG
    kept = {"log.retention.ms": "1000", MIN_ISR: "1"}
    assert error_of(replace(on, kept, **everyone)) is ErrorCode.NONE
    assert on.image.broker_config(None) == kept


def test_a_broker_alone_may_forget_its_min_insync_replicas() -> None:
    on = controller()
    alter(on, (SET, MIN_ISR, "2"), type=BROKER_RESOURCE, name="")
    alter(on, (DELETE, MIN_ISR, None), type=BROKER_RESOURCE, name="")
    assert not on.image.configs
