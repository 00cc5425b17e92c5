from __future__ import annotations

from datetime import datetime

import pytest

from penstock.cli.positions import Position, parse_position


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("beginning", Position("beginning")),
        ("earliest", Position("beginning")),
        ("END", Position("end")),
        ("latest", Position("end")),
        ("0", Position("offset", 0)),
        ("17", Position("offset", 17)),
        ("-10", Position("last", 10)),
        ("@1700000000000", Position("time", 1_700_000_000_000)),
        ("2023-11-14T22:13:20Z", Position("time", 1_700_000_000_000)),
        ("2023-11-14T23:13:20.500+01:00", Position("time", 1_700_000_000_500)),
    ],
)
def test_a_place_in_a_topic_has_many_names(text: str, position: Position) -> None:
    assert parse_position(text) == position


def test_a_time_without_a_zone_is_local() -> None:
    here = datetime(2024, 2, 29, 12, 0).astimezone()
    assert parse_position("2024-02-29T12:00") == Position("time", round(here.timestamp() * 1000))


@pytest.mark.parametrize("text", ["", "soon", "--1", "1.5", "@now", "@9223372036854775808", "2024-02-30"])
def test_what_is_no_place_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="Use beginning, end, an offset, -N, or a time"):
        parse_position(text)
