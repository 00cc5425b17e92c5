"""Clients of two listeners and two versions ask for all topics while brokers have different listeners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.network import metadata_pages
from penstock.broker.network.metadata_pages import PARTITIONS_PER_TURN, MetadataPages
from penstock.metadata.image import Image, TopicImage
from penstock.model import BrokerId
from penstock.protocol.messages import OPERATIONS_OMITTED
from tests.broker.network.test_metadata_pages import registered, topic

REQUESTS = 40


def test_requests_that_alternate_do_not_each_encode_all_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image()
    records = registered(1, 2)
    for number in range(1, 5):
        records += topic(number, f"t{number}", PARTITIONS_PER_TURN // 2, 1, 2)
    image, _ = image.apply(records)
    soon: deque[Callable[[], None]] = deque()
    spawn: Any = type("Spawn", (), {"soon": lambda _, callback: soon.append(callback)})()
    packed: list[str] = []
    make = metadata_pages.topic_packer

    def counted(*arguments: Any) -> Callable[[TopicImage], bytes]:
        pack = make(*arguments)

        def count(each: TopicImage) -> bytes:
            packed.append(each.name)
            return pack(each)

        return count

    monkeypatch.setattr(metadata_pages, "topic_packer", counted)
    pages = MetadataPages(spawn)
    keys = [
        (version, unlisted) for version in (9, 12) for unlisted in (frozenset(), frozenset({BrokerId(2)}))
    ]
    answered: list[list[bytes]] = []
    for number in range(REQUESTS):
        version, unlisted = keys[number % len(keys)]
        pages.list_topics(image, version, OPERATIONS_OMITTED, unlisted, answered.append)
    while soon:
        soon.popleft()()
    assert len(answered) == REQUESTS
    # Once for each version and listener; not once for each request.
    assert len(packed) <= len(keys) * len(image.topics)
