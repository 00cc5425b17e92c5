"""The names of files, and the one that says which topic they belong to."""

from __future__ import annotations

import pytest

from penstock.log.names import offset_of, path_of, read_partition_metadata, write_partition_metadata
from penstock.model import TopicId
from tests.log.making import DIRECTORY, made_files

TOPIC_ID = TopicId(bytes(range(16)))


def test_offsets_are_written_with_twenty_digits_and_read_back() -> None:
    assert path_of("/d", 42, ".log") == "/d/00000000000000000042.log"
    assert offset_of("00000000000000000042.log", ".log") == 42
    assert offset_of("09223372036854775807.log", ".log") == 2**63 - 1


@pytest.mark.parametrize(
    "name",
    [
        "42.log",
        "0000000000000000004x.log",
        "00000000000000000042.log.deleted",
        "-0000000000000000042.log",
        ".log",
        "",
    ],
)
def test_other_names_are_no_segments(name: str) -> None:
    assert offset_of(name, ".log") is None


def test_the_topic_id_is_written_as_kafka_does() -> None:
    files = made_files()
    files.make_directory(DIRECTORY)
    assert read_partition_metadata(files, DIRECTORY) is None
    write_partition_metadata(files, DIRECTORY, TOPIC_ID)
    assert files.read(f"{DIRECTORY}/partition.metadata") == b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw"
    assert read_partition_metadata(files, DIRECTORY) == TOPIC_ID


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"version: 1\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version: 0\n",
        b"version: 0\ntopic_id: short",
        b"\xff",
    ],
)
def test_a_file_that_says_something_else_names_no_topic(text: bytes) -> None:
    files = made_files()
    files.make_directory(DIRECTORY)
    files.replace(f"{DIRECTORY}/partition.metadata", text)
    assert read_partition_metadata(files, DIRECTORY) is None
