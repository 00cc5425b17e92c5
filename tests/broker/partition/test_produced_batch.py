"""The checks of a produced batch that need its records: only for compacted topics, and within limits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.config import BrokerConfig, TopicConfig
from penstock.broker.partition import produced_batch
from penstock.broker.partition.produced_batch import RECORD_ERRORS_MAX, Appended, check_batch
from penstock.metadata.image import Image
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import NO_TIMESTAMP, encode_batch

NOW_MS = 1_700_000_000_000


def topic_config(policy: str) -> TopicConfig:
    config, _ = BrokerConfig.load({"log.cleanup.policy": policy})
    return config.topic_config(Image(), 1, "t")


COMPACTED, DELETED = topic_config("compact"), topic_config("delete")


def checked(keys: list[bytes | None], config: TopicConfig) -> Any:
    batch = encode_batch([(NOW_MS, key, b"v", []) for key in keys])
    host: Any = None
    return check_batch(memoryview(batch), config, NOW_MS, host, allow_zstd=True)


def refused(keys: list[bytes | None]) -> Appended:
    appended = checked(keys, COMPACTED)
    assert isinstance(appended, Appended)
    return appended


def test_records_are_read_for_compacted_topics_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def keyless_records(records: memoryview, *, bytes_max: int) -> list[int]:
        read.append(bytes_max)
        return []

    monkeypatch.setattr(produced_batch, "keyless_records", keyless_records)
    header, stamped = checked([None], DELETED)
    assert (header.count, stamped, read) == (1, NO_TIMESTAMP, [])
    checked([b"k"], COMPACTED)
    assert read == [produced_batch.COMPACTED_BATCH_BYTES_MAX]


def test_the_message_counts_the_records_without_a_key() -> None:
    one, two = refused([b"a", None]).refused, refused([None, None]).refused
    assert one is not None and two is not None
    assert one.message == "The topic is compacted, and a record in the batch has no key."
    assert two.message == "The topic is compacted, and 2 records in the batch have no key."
    assert (list(one.records), list(two.records)) == ([1], [0, 1])


def test_a_response_names_a_limited_number_of_records() -> None:
    found = refused([None] * (RECORD_ERRORS_MAX + 5)).refused
    assert found is not None
    assert list(found.records) == list(range(RECORD_ERRORS_MAX))
    assert f"{RECORD_ERRORS_MAX + 5} records" in found.message


def test_a_batch_with_too_many_records_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produced_batch, "COMPACTED_BATCH_RECORDS_MAX", 3)
    header, _ = checked([b"k"] * 3, COMPACTED)
    assert header.count == 3
    monkeypatch.delattr(produced_batch, "keyless_records")
    appended = refused([b"k"] * 4)
    assert appended.error is ErrorCode.MESSAGE_TOO_LARGE
    assert appended.refused is not None
    assert (
        appended.refused.message
        == "A batch for a compacted topic has at most 3 records: send smaller batches."
    )
