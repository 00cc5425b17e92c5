"""Checkers of what clients see.

Each class guards one invariant and states it in its first line; the numbers are those of the project's
invariants. They are called for every event and raise ``Violation`` at the first contradiction, while the state
that led to it can still be inspected. ``final`` checks what can only be judged at the end (was everything
acknowledged also read?).

An acknowledgement with acks=1 guarantees nothing for later, and a missing response says nothing. Only records
acknowledged with acks=all, or read by a consumer, must exist for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.sim.client import Place
from penstock.sim.report import Violation

# The lease of every broker: two thirds of broker.session.timeout.ms. The slack allows for clock drift.
LEASE_MS = 6_000
LEASE_SLACK_MS = 500
# Used where the epoch of a response does not matter.
NEWEST_EPOCH = 2**31 - 1


class Seen(NamedTuple):
    value: bytes
    epoch: int
    by: str


class OneValuePerOffset:
    """3, 15: every offset of a partition has one value, for ever, for every reader."""

    def __init__(self) -> None:
        self.values: dict[Place, dict[int, Seen]] = {}
        # The timestamps of the records read.
        self.times: dict[Place, dict[int, int]] = {}
        self.compared = 0

    def saw(self, place: Place, offset: int, value: bytes, epoch: int, by: str) -> None:
        seen = self.values.setdefault(place, {})
        before = seen.get(offset)
        if before is None:
            seen[offset] = Seen(value, epoch, by)
            return
        self.compared += 1
        if before.value != value or before.epoch != epoch:
            raise Violation(
                f"inconsistent offsets: {place} at {offset} was {before.value!r} (epoch {before.epoch}) for "
                f"{before.by} and is {value!r} (epoch {epoch}) for {by}"
            )

    def end(self, place: Place) -> int:
        """The offset after the last one read."""
        return max(self.values.get(place, {}), default=-1) + 1


@dataclass(slots=True)
class Sent:
    place: Place
    # Records of one producer are in order; empty where order is not promised.
    producer: str
    number: int
    # Whether its acknowledgement is a promise: acks=all.
    is_promise: bool
    # The acknowledged offset; -1 until then.
    offset: int = -1
    # The broker said that it did not and will not write it.
    has_failed: bool = False


class EveryPromiseKept:
    """1, 2, 4, 5, 10: acknowledged records are read, once, in order, and refused records never are."""

    def __init__(self, values: OneValuePerOffset, starts: StartsOnlyGrow) -> None:
        self._values = values
        self._starts = starts
        self.sent: dict[bytes, Sent] = {}
        # Where each value was read.
        self._found: dict[bytes, tuple[Place, int]] = {}
        # Number -> offset for each producer; both rise together.
        self._order: dict[tuple[str, Place], dict[int, int]] = {}
        self.acknowledged = 0
        self.refused = 0

    def sending(self, place: Place, producer: str, number: int, value: bytes, *, is_promise: bool) -> Sent:
        assert value not in self.sent
        sent = self.sent[value] = Sent(place, producer, number, is_promise)
        return sent

    def acked(self, value: bytes, offset: int) -> None:
        sent = self.sent[value]
        if sent.is_promise:
            if sent.offset >= 0 and sent.offset != offset:
                raise Violation(f"duplicate: {value!r} was acknowledged at {sent.offset} and at {offset}")
            seen = self._values.values.get(sent.place, {}).get(offset)
            if seen is not None and seen.value != value:
                raise Violation(
                    f"lost write: {value!r} is acknowledged at {sent.place} {offset}, where {seen.by} read "
                    f"{seen.value!r} (epoch {seen.epoch})"
                )
        sent.offset = offset
        self.acknowledged += 1

    def failed(self, value: bytes) -> None:
        self.sent[value].has_failed = True
        self.refused += 1
        if value in self._found:
            raise Violation(f"G1a: {value!r} was read and is refused")

    def read(self, place: Place, offset: int, value: bytes, by: str) -> None:
        sent = self.sent.get(value)
        if sent is None:
            raise Violation(f"{by} read {value!r} in {place} at {offset}, which nobody sent")
        if sent.place != place:
            raise Violation(f"{by} read {value!r} in {place}, but it was sent to {sent.place}")
        if sent.has_failed:
            raise Violation(f"G1a: {by} read {value!r} in {place} at {offset}, whose sending failed")
        found = self._found.setdefault(value, (place, offset))
        if found != (place, offset):
            raise Violation(f"duplicate: {value!r} is in {place} at {found[1]} and at {offset}")
        if sent.is_promise and sent.offset >= 0 and sent.offset != offset:
            raise Violation(
                f"inconsistent offsets: {value!r} was acknowledged at {sent.offset} of {place}, and {by} "
                f"read it at {offset}"
            )
        self._in_order(sent, offset, value)

    def _in_order(self, sent: Sent, offset: int, value: bytes) -> None:
        if not sent.producer:
            return
        known = self._order.setdefault((sent.producer, sent.place), {})
        if sent.number in known:
            return
        known[sent.number] = offset
        for step in (-1, 1):
            neighbour = known.get(sent.number + step)
            if neighbour is not None and (offset - neighbour) * -step <= 0:
                raise Violation(
                    f"order: {value!r} of {sent.producer} at {offset} of {sent.place}, its neighbour at {neighbour}"
                )

    def final(self, read_to: dict[Place, int]) -> None:
        """Check that nothing is missing, after everything up to these offsets was read."""
        for value, sent in self.sent.items():
            if not sent.is_promise or sent.offset < 0 or sent.place not in read_to:
                continue
            if sent.offset < self._starts.deleted_before(sent.place):
                continue
            if sent.offset >= read_to[sent.place]:
                raise Violation(
                    f"lost write: {value!r} was acknowledged at {sent.offset} of {sent.place}, which ends "
                    f"at {read_to[sent.place]}"
                )
            if value not in self._found:
                raise Violation(f"unseen: {value!r}, acknowledged at {sent.offset} of {sent.place}")
        for (producer, place), offsets in self._order.items():
            in_order = [offsets[number] for number in sorted(offsets)]
            if in_order != sorted(in_order):
                raise Violation(f"order: {producer} in {place}: {in_order}")


class StartsOnlyGrow:
    """25: a log's start only rises, and only as far as a deletion was requested."""

    def __init__(self) -> None:
        # Acknowledged deletions: (start offset, epoch of the leader that was asked).
        self._deleted: dict[Place, tuple[int, int]] = {}
        self._asked: dict[Place, int] = {}
        # Partitions whose retention may remove anything that is committed.
        self.expiring: dict[Place, None] = {}

    def asked(self, place: Place, offset: int) -> None:
        """A deletion was requested; it may take effect from now on."""
        self._asked[place] = max(self._asked.get(place, 0), offset)

    def deleted(self, place: Place, start: int, epoch: int = 0) -> None:
        """A deletion was acknowledged."""
        if start >= self.acknowledged(place)[0]:
            self._deleted[place] = (start, epoch)

    def acknowledged(self, place: Place) -> tuple[int, int]:
        """The acknowledged deletion: (before this offset, by a leader of this epoch)."""
        return self._deleted.get(place, (0, 0))

    def saw(
        self,
        place: Place,
        start: int,
        by: str,
        *,
        epoch: int = NEWEST_EPOCH,
        since: tuple[int, int] | None = None,
    ) -> None:
        """Check the log start in a response of a leader of this epoch.

        ``since`` is the deletion that had been acknowledged when the consumer asked. A leader of an older epoch
        than that of the deletion may not know of it.
        """
        deleted, of_epoch = self.acknowledged(place) if since is None else since
        if start < deleted and epoch >= of_epoch:
            raise Violation(
                f"{by} was told that {place} starts at {start}; everything before {deleted} was deleted"
            )
        if start > self._asked.get(place, 0) and place not in self.expiring:
            raise Violation(
                f"{by} was told that {place} starts at {start}; deletion was asked for up to "
                f"{self._asked.get(place, 0)}"
            )

    def deleted_before(self, place: Place) -> int:
        if place in self.expiring:
            return 2**62
        return self._asked.get(place, 0)


class EveryPollGoesOn:
    """8, 9: a reader with assigned partitions gets every offset once, in order, without gaps."""

    def __init__(self, starts: StartsOnlyGrow) -> None:
        self._starts = starts
        self.polled = 0

    def polled_from(self, place: Place, expected: int, offset: int, by: str) -> None:
        self.polled += 1
        if offset < expected:
            raise Violation(f"nonmonotonic poll: {by} expected {expected} of {place} and got {offset}")
        if offset > expected >= self._starts.deleted_before(place):
            raise Violation(f"poll skip: {by} expected {expected} of {place} and got {offset}")


@dataclass(slots=True)
class _Commits:
    # Offset and generation of the last acknowledged commit.
    acknowledged: int = -1
    generation: int = -1
    # (generation, offset) of commits whose outcome is unknown.
    open: list[tuple[int, int]] = field(default_factory=list)
    # Acknowledged while the topic was being deleted: they may count for the next topic with the same name.
    strays: list[int] = field(default_factory=list)
    # Of classic producers. A copy of the request may come late, in the next transaction; or a copy of an earlier
    # EndTxn, which commits a transaction that nobody asked to commit.
    late: list[int] = field(default_factory=list)

    def answered(self, generation: int, offset: int) -> None:
        # A response may reach a client that was paused while a newer generation committed.
        if generation >= self.generation or (generation, offset) in self.open:
            self.open.remove((generation, offset))


class CommitsSurvive:
    """23: the next member of a group gets the offset that the group committed."""

    def __init__(self) -> None:
        self._commits: dict[tuple[str, Place], _Commits] = {}
        self.acknowledged = 0
        self.resumed = 0
        self.excused = 0

    def committing(self, group: str, place: Place, generation: int, offset: int) -> None:
        self._commits.setdefault((group, place), _Commits()).open.append((generation, offset))

    def may_come_late(self, group: str, place: Place, offset: int) -> None:
        """Nothing in a classic TxnOffsetCommit or EndTxn says which transaction of its epoch it belongs to."""
        self._commits.setdefault((group, place), _Commits()).late.append(offset)

    def refused(self, group: str, place: Place, generation: int, offset: int) -> None:
        self._commits[(group, place)].answered(generation, offset)

    def acked(
        self, group: str, place: Place, generation: int, offset: int, *, is_deleting: bool = False
    ) -> None:
        commits = self._commits[(group, place)]
        commits.answered(generation, offset)
        if is_deleting:
            commits.strays.append(offset)
            return
        if generation < commits.generation:
            return  # a slow response: a newer generation has committed since
        commits.acknowledged, commits.generation = offset, generation
        # An older generation can no longer commit.
        commits.open = [entry for entry in commits.open if entry[0] >= generation]
        self.acknowledged += 1

    def fetched(self, group: str, place: Place, offset: int, by: str) -> None:
        """A member resumes at this offset; -1 if there is no commit."""
        commits = self._commits.get((group, place), _Commits())
        self.resumed += 1
        if offset != commits.acknowledged and offset not in [entry[1] for entry in commits.open]:
            if commits.acknowledged < 0 and offset in self._strays(group, place):
                return
            if offset in commits.late:
                self.excused += 1
                return
            raise Violation(
                f"lost commit: {by} of {group} resumes {place} at {offset}; acknowledged was "
                f"{commits.acknowledged} in generation {commits.generation}, open are {commits.open}"
            )

    def _strays(self, group: str, place: Place) -> list[int]:
        """Offsets of other topics with the same name that may have been committed to this one.

        Clients commit by name, and their request may arrive after their topic was deleted.
        """
        strays: list[int] = []
        for (by, other), commits in self._commits.items():
            if (
                by == group
                and other != place
                and (other.topic, other.partition) == (place.topic, place.partition)
            ):
                strays += commits.strays
                strays += [offset for _, offset in commits.open]
        return strays


class OneOwner:
    """23: at most one member owns a partition in a generation."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, int, Place], str] = {}
        self.generations: dict[tuple[str, int], None] = {}

    def owns(self, group: str, generation: int, place: Place, member: str) -> None:
        self.generations[(group, generation)] = None
        owner = self._owners.setdefault((group, generation, place), member)
        if owner != member:
            raise Violation(
                f"two owners of {place} in generation {generation} of {group}: {owner} and {member}"
            )


class OldLeadersFallSilent:
    """6, 17: once a newer leader has answered, an older one answers only for the rest of its lease.

    A leader that is fenced because it sends no heartbeats has lost its lease before. A leader whose leadership is
    moved while it is alive, or that was wrongly taken for dead, may not know of it yet.
    """

    def __init__(self) -> None:
        # When a leader of each epoch first answered a request.
        self._first_ms: dict[Place, dict[int, float]] = {}
        self.answers = 0

    def answered(self, place: Place, epoch: int, asked_ms: float, now_ms: float, by: str) -> None:
        """A leader of this epoch answered a request sent at ``asked_ms``."""
        self.answers += 1
        first_ms = self._first_ms.setdefault(place, {})
        first_ms.setdefault(epoch, now_ms)
        for newer, since_ms in first_ms.items():
            if newer > epoch and asked_ms > since_ms + LEASE_MS + LEASE_SLACK_MS:
                raise Violation(
                    f"stale leader: {by} asked for {place} at {asked_ms:.0f} ms and was answered in epoch {epoch}; "
                    f"epoch {newer} has had a leader that answers since {since_ms:.0f} ms"
                )


class TimesFindRecords:
    """3: a query by time returns the first record with that time or a later one."""

    def __init__(self, values: OneValuePerOffset, starts: StartsOnlyGrow) -> None:
        self._values = values
        self._starts = starts
        self.asked = 0

    def expected(self, place: Place, time_ms: int) -> int:
        """The first offset known to have this time or a later one; -1 if none is known."""
        times = self._values.times.get(place, {})
        return min((offset for offset, at_ms in times.items() if at_ms >= time_ms), default=-1)

    def found(self, place: Place, time_ms: int, expected: int, offset: int, by: str) -> None:
        """Check a response; ``expected`` was computed when the request was sent."""
        self.asked += 1
        is_there = expected >= max(0, self._starts.deleted_before(place))
        if is_there and not 0 <= offset <= expected:
            raise Violation(
                f"{by} asked {place} for the time {time_ms} and was told offset {offset}; that of {expected} "
                f"is {self._values.times[place][expected]}"
            )
        at_ms = self._values.times.get(place, {}).get(offset)
        if at_ms is not None and at_ms < time_ms:
            raise Violation(
                f"{by} asked {place} for the time {time_ms} and was told offset {offset}, whose time is {at_ms}"
            )


class ClientCheckers:
    """All checkers of what clients see."""

    def __init__(self) -> None:
        self.values = OneValuePerOffset()
        self.starts = StartsOnlyGrow()
        self.promises = EveryPromiseKept(self.values, self.starts)
        self.polls = EveryPollGoesOn(self.starts)
        self.commits = CommitsSurvive()
        self.owners = OneOwner()
        self.leaders = OldLeadersFallSilent()
        self.times = TimesFindRecords(self.values, self.starts)
