from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import Penstock

pytestmark = pytest.mark.interop


@pytest.fixture
def topic(kafka: Penstock, unique: Callable[[str], str]) -> str:
    name = unique("topic")
    kafka("topics", "create", name)
    return name


def setting(kafka: Penstock, name: str, *target: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = kafka("configs", "describe", *target, "--json").json
    return next(each for each in found if each["name"] == name)


def test_a_topic_has_settings_with_their_source(kafka: Penstock, topic: str) -> None:
    assert setting(kafka, "retention.ms", topic) == {
        "name": "retention.ms",
        "value": "604800000",
        "source": "default",
        "read_only": False,
        "sensitive": False,
    }
    assert ["retention.ms", "604800000", "default"] in kafka("configs", "describe", topic).rows


def test_what_is_set_is_the_topics_own_and_the_rest_stays(kafka: Penstock, topic: str) -> None:
    kafka("configs", "set", topic, "retention.ms=1000", "max.message.bytes=2000000")
    kafka("configs", "set", topic, "retention.ms=2000")
    assert setting(kafka, "retention.ms", topic)["value"] == "2000"
    assert setting(kafka, "max.message.bytes", topic)["source"] == "topic"
    changed = [row[0] for row in kafka("configs", "describe", topic, "--changed").rows]
    assert {"retention.ms", "max.message.bytes"} <= set(changed)
    assert "segment.bytes" not in changed


def test_what_is_unset_falls_back(kafka: Penstock, topic: str) -> None:
    kafka("configs", "set", topic, "retention.ms=1000")
    assert kafka("configs", "unset", topic, "retention.ms", "--json").json == {
        "topic": topic,
        "unset": ["retention.ms"],
    }
    assert setting(kafka, "retention.ms", topic)["value"] == "604800000"


def test_a_value_that_cannot_be_is_refused_and_changes_nothing(kafka: Penstock, topic: str) -> None:
    kafka("configs", "set", topic, "retention.ms=soon", code=1)
    assert setting(kafka, "retention.ms", topic)["source"] == "default"


def test_a_broker_has_settings_too(kafka: Penstock) -> None:
    assert setting(kafka, "log.retention.hours", "--broker", "1")["value"] == "168"


def test_a_broker_that_is_not_there_is_said_at_once(kafka: Penstock) -> None:
    assert "there is no broker 99" in kafka("configs", "describe", "--broker", "99", code=1).err


@pytest.mark.parametrize(
    "words",
    [
        ["describe"],
        ["describe", "t", "--broker", "1"],
        ["set", "retention.ms=5"],
        ["set", "t"],
        ["set", "t", "retention.ms"],
        ["unset", "t"],
    ],
)
def test_what_is_meant_must_be_said(kafka: Penstock, words: list[str]) -> None:
    kafka("configs", *words, code=2)
