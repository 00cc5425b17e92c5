"""Durations as people write them."""

from __future__ import annotations

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_text(ms: int) -> str:
    """Whole numbers of the largest unit of which there are at least two: 250ms, 42s, 15m, 3h, 2d."""
    for unit in ("d", "h", "m", "s"):
        if ms >= 2 * UNITS_MS[unit]:
            return f"{ms // UNITS_MS[unit]}{unit}"
    return f"{ms}ms"


def seconds_text(seconds: float) -> str:
    """The same for seconds: 0s and 1s have no parts."""
    if seconds == 0 or 1 <= seconds < 2:
        return f"{int(seconds)}s"
    return duration_text(int(seconds * 1000))
