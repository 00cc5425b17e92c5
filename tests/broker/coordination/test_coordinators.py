"""Which coordinator a key belongs to."""

from __future__ import annotations

import pytest

from penstock.broker.coordination.coordinators import partition_for


@pytest.mark.parametrize(
    ("key", "partition"),
    [
        ("", 0),
        ("readers", 28),
        ("group-1", 49),
        ("\u65e5\u672c", 47),
        ("\U0001f600 group", 6),
        # Its hash is the most negative number.
        ("polygenelubricants", 0),
        ("a-very-long-group-id-that-overflows-the-hash", 2),
    ],
)
def test_keys_go_to_the_partition_that_java_computes(key: str, partition: int) -> None:
    assert partition_for(key, 50) == partition
