"""What a log remembers of its compaction, in a small file beside the segments.

    {"version": 1, "topic_id": "...", "first_dirty_offset": 4711, "committed_before": 4800, "swap": null,
     "last_run": {...}}

``swap`` is the intent to replace the segments of one range of offsets by a cleaned file (``swapping.py``). It is
durable before the first file is renamed and goes when the last rename is durable, so the next start can complete a
swap that a crash has interrupted. Without the file the log counts as never cleaned, which costs one pass over it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.environment import Files

CLEANING = "penstock-cleaning"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class CleaningRun:
    """The outcome of one pass of the cleaner over a log."""

    # Wall time of its end.
    ended_ms: int
    duration_ms: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


@dataclass(slots=True)
class CleaningState:
    # Exclusive: everything below has been compacted at least once.
    first_dirty_offset: int = 0
    # Exclusive: everything below was committed when it was compacted, markers of transactions included. It explains
    # why records are gone: their successors are below it.
    committed_before: int = 0
    # (base offset, end offset) of the segments being replaced; None when none are.
    swap: tuple[int, int] | None = None
    last_run: CleaningRun | None = None
    # Not stored: why the cleaner leaves this log alone, in one line; None when it does not.
    set_aside: str | None = field(default=None, compare=False)

    def encode(self, topic_id: str) -> bytes:
        return json.dumps(
            {
                "version": _VERSION,
                "topic_id": topic_id,
                "first_dirty_offset": self.first_dirty_offset,
                "committed_before": self.committed_before,
                "swap": self.swap,
                "last_run": None if self.last_run is None else asdict(self.last_run),
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """How far a log is compacted, for people."""

    # Of what may be compacted: everything before the active segment and the last stable offset.
    cleanable_bytes: int
    # The part of it that is not compacted yet.
    dirty_bytes: int
    first_dirty_offset: int
    last_run: CleaningRun | None
    set_aside: str | None


def read_state(files: Files, directory: str) -> tuple[CleaningState, str]:
    """The state in a log's directory, and the topic it is of; of a log never cleaned if there is no valid one."""
    if not files.exists(f"{directory}/{CLEANING}"):
        return CleaningState(), ""
    try:
        stored: Any = json.loads(files.read(f"{directory}/{CLEANING}"))
        if stored["version"] != _VERSION:
            return CleaningState(), ""
        swap, run = stored["swap"], stored["last_run"]
        state = CleaningState(
            int(stored["first_dirty_offset"]),
            int(stored.get("committed_before", stored["first_dirty_offset"])),
            None if swap is None else (int(swap[0]), int(swap[1])),
            None if run is None else CleaningRun(**run),
        )
        return state, str(stored["topic_id"])
    except (KeyError, TypeError, ValueError, IndexError):
        return CleaningState(), ""
