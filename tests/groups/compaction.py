"""What the log cleaner does, as a model on the list of changes that a log consists of.

A place in the list stands for an offset. Everything below ``end`` is cleaned, and ``end`` is at most
``last_stable_place``: below it every transaction has ended. Of each key the last record below ``end`` stays, where
the records of aborted transactions do not count and are removed. A tombstone that is the last record of its key
goes when its time is over, and so does the marker of a transaction of which no record is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.groups.changes import Change, GroupRemoved, OffsetRemoved, encode
from penstock.groups.coordinator import Coordinator
from tests.groups.conversation import Ended, InTransaction, Logged


def last_stable_place(log: Sequence[Logged]) -> int:
    """The place of the first record whose transaction has not ended; the end of the log if there is none."""
    return next(
        (
            place
            for place, logged in enumerate(log)
            if isinstance(logged, InTransaction) and _is_committed(log, place) is None
        ),
        len(log),
    )


def compacted(log: Sequence[Logged], end: int, is_over: Callable[[int], bool]) -> list[Logged]:
    """``is_over`` says for a place whether a tombstone or marker there was kept for long enough."""
    assert end <= last_stable_place(log)
    last = {
        encode(change)[0]: place
        for place, logged in enumerate(log[:end])
        if (change := change_of(logged)) is not None and _is_committed(log, place)
    }
    kept: list[Logged] = []
    # Producers with a record that is left, in a transaction whose marker comes later.
    with_records: set[int] = set()
    for place, logged in enumerate(log[:end]):
        if isinstance(logged, Ended):
            if logged.producer_id in with_records or not is_over(place):
                kept.append(logged)
            with_records.discard(logged.producer_id)
            continue
        change = change_of(logged)
        assert change is not None
        is_last = last.get(encode(change)[0]) == place
        is_tombstone = isinstance(change, OffsetRemoved | GroupRemoved)
        if is_last and not (is_tombstone and is_over(place)):
            kept.append(logged)
            if isinstance(logged, InTransaction):
                with_records.add(logged.producer_id)
    return [*kept, *log[end:]]


def change_of(logged: Logged) -> Change | None:
    """None for a marker."""
    if isinstance(logged, Ended):
        return None
    return logged.change if isinstance(logged, InTransaction) else logged


def state_of(coordinator: Coordinator) -> dict[str, Any]:
    """All that a replay leads to, so that two replays can be compared."""
    return {
        group_id: (
            group.state,
            group.confirmed,
            group.to_stored(),
            group.subscribed_topics,
            group.static_members,
            {(offset.topic, offset.partition): offset for offset in group.offsets.committed()},
            {key: list(opened.items()) for key, opened in group.offsets._open.items()},
            group.offsets._adopted,
            set(group.offsets.producer_ids()),
        )
        for group_id, group in coordinator._groups.items()
    }


def _is_committed(log: Sequence[Logged], place: int) -> bool | None:
    """Whether a record counts; None while its transaction is open."""
    record = log[place]
    if not isinstance(record, InTransaction):
        return True
    for logged in log[place:]:
        if isinstance(logged, Ended) and logged.producer_id == record.producer_id:
            return logged.is_commit
    return None
