"""A compacted log of a group coordinator says what the whole log says, whatever is in it.

The logs are arbitrary ones: equal records, offsets of deleted topics, records without topic ids as earlier versions
wrote them, offsets in transactions of several producers that overlap with plain ones, markers without transactions.
They are cleaned several times, as far as they are stable each time. ``test_groups.py`` does the same with the logs
that a coordinator writes.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.groups.changes import (
    NO_TOPIC_ID,
    GroupRemoved,
    GroupStored,
    OffsetCommitted,
    OffsetRemoved,
    StoredMember,
)
from penstock.groups.coordinator import Coordinator
from penstock.groups.settings import GroupSettings
from tests.groups.compaction import change_of, compacted, last_stable_place, state_of
from tests.groups.conversation import Ended, InTransaction, Logged, replay, subscription, topic_id

PRODUCERS = (7, 8, 9)
MEMBER = StoredMember("m", None, "c", "/h", 1_000, 1_000, subscription("orders"), b"")


def stored(group_id: str, generation: int, is_empty: bool) -> GroupStored:
    if is_empty:
        return GroupStored(group_id, "consumer", generation, None, None, generation, ())
    return GroupStored(group_id, "consumer", generation, "range", "m", generation, (MEMBER,))


@st.composite
def logs(draw: st.DrawFn) -> list[Logged]:
    # Few keys and values, often one key only, so that records have something to do with each other.
    keys = [("a", "orders", 0), ("a", "orders", 1), ("b", "orders", 0), ("a", "gone", 0)]
    keys = keys[: draw(st.sampled_from([1, 1, len(keys)]))]
    # The topic was created a second time.
    ids = draw(st.sampled_from([[NO_TOPIC_ID], [topic_id("orders", 1), topic_id("orders", 2), NO_TOPIC_ID]]))
    offsets = [OffsetCommitted(*key, offset, topic_id=id) for key in keys for offset in (0, 1) for id in ids]
    committed = st.sampled_from(offsets)
    producers = st.sampled_from(PRODUCERS[: draw(st.integers(1, len(PRODUCERS)))])
    in_transactions = st.builds(InTransaction, committed, producers, st.just(0))
    records: list[st.SearchStrategy[Logged]] = [
        committed,
        in_transactions,
        in_transactions,
        st.builds(Ended, producers, st.booleans()),
    ]
    if draw(st.booleans()):
        groups = st.sampled_from(["a", "b"])
        records += [
            st.builds(lambda key: OffsetRemoved(*key), st.sampled_from(keys)),
            st.builds(stored, groups, st.integers(1, 3), st.booleans()),
            st.builds(GroupRemoved, groups),
        ]
    # What comes late hides what came before it: short logs find the most.
    log = draw(st.lists(st.one_of(records), max_size=draw(st.sampled_from([6, 12, 30]))))
    if draw(st.booleans()):
        log += [
            Ended(id, draw(st.sampled_from([True, True, False]))) for id in draw(st.permutations(PRODUCERS))
        ]
    return log


def loaded(log: list[Logged]) -> Coordinator:
    coordinator = Coordinator(GroupSettings(), random.Random(0), {"orders": topic_id("orders", 2)}.get)
    replay(coordinator, log)
    coordinator.loaded(0, 0)
    coordinator.check()
    return coordinator


@settings(max_examples=800, deadline=None)
@given(log=logs(), data=st.data())
def test_a_compacted_log_replays_to_the_same_state(log: list[Logged], data: st.DataObject) -> None:
    cleaned = log
    for _ in range(data.draw(st.integers(1, 3), label="runs")):
        stable = last_stable_place(cleaned)
        end = data.draw(st.just(stable) | st.integers(0, stable), label="end")
        cleaned = compacted(cleaned, end, lambda _: data.draw(st.booleans(), label="is over"))
        assert state_of(loaded(cleaned)) == state_of(loaded(log))
    # Whatever comes now has the same effect: here, the ends of the transactions that are open.
    ends = [Ended(id, data.draw(st.booleans())) for id in data.draw(st.permutations(PRODUCERS))]
    assert state_of(loaded([*cleaned, *ends])) == state_of(loaded([*log, *ends]))


@settings(max_examples=100, deadline=None)
@given(log=logs())
def test_what_is_left_of_a_whole_log_is_one_record_of_each_key(log: list[Logged]) -> None:
    ended = [*log, *(Ended(id, True) for id in PRODUCERS)]
    cleaned = compacted(ended, len(ended), lambda _: True)
    coordinator = loaded(cleaned)
    records = [change for logged in cleaned if (change := change_of(logged)) is not None]
    count = sum(
        len(list(group.offsets.committed())) + (group.confirmed is not None)
        for group in coordinator._groups.values()
    )
    assert len(records) == count
    assert not any(isinstance(record, OffsetRemoved | GroupRemoved) for record in records)
