"""The two phases of a rebalance and the timers that end them.

This is the middle layer. ``classic_group.py`` below has the state of a group, ``membership.py`` above handles the
requests; this file decides what follows when a member comes, goes or stays away. Every method takes a ``Turn``,
which collects the changes and replies.

A reply in the turn may not be sent before the changes of the same turn are committed. So the state is Stable as
soon as the leader's assignment is decided, when no member has it yet.
"""

from __future__ import annotations

from penstock.groups.classic.answers import join_refused, joined, synced
from penstock.groups.classic.classic_group import ClassicGroup, Member, State
from penstock.groups.settings import RETRY_MS_MIN, GroupSettings
from penstock.groups.timers import Timers
from penstock.groups.turn import Turn
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import SyncGroupResponse


class Rebalance:
    def __init__(self, settings: GroupSettings, timers: Timers) -> None:
        self._settings = settings
        self._timers = timers

    # Sessions

    def touch(self, member: Member, now_ms: int) -> None:
        """Restart the session of a member that is alive."""
        self._timers.start(member.session, now_ms + member.session_timeout_ms)

    def remove(self, group: ClassicGroup, member: Member, error: ErrorCode, turn: Turn) -> None:
        """Remove a member and answer its waiting requests. The caller continues with ``member_gone``."""
        waiting = group.stop_waiting_for_join(member)
        if waiting is not None:
            turn.answer(waiting, join_refused(error, "", waiting.version))
        self._answer_sync(member, error, turn)
        self._timers.cancel(member.session)
        group.remove(member.id)

    def member_gone(self, group: ClassicGroup, turn: Turn) -> None:
        """Continue after members have been removed."""
        if group.state in (State.STABLE, State.COMPLETING):
            self.prepare(group, turn)
        else:
            self.try_complete_join(group, turn)

    # The join phase

    def prepare(self, group: ClassicGroup, turn: Turn) -> None:
        """Begin a rebalance: all members have to join again."""
        if group.state is State.COMPLETING:
            for member in group.members.values():
                self._answer_sync(member, ErrorCode.REBALANCE_IN_PROGRESS, turn)
        group.unsynced.clear()
        self._timers.cancel(group.sync_timer)

        if group.state is State.EMPTY:
            # More members will come soon; a short delay saves most of them a second rebalance (KIP-134).
            delay_ms = self._settings.initial_rebalance_delay_ms
            group.initial_deadline_ms = turn.now_ms + max(delay_ms, group.rebalance_timeout_ms)
            group.new_member_added = False
            group.move_to(State.PREPARING, turn.wall_ms)
            self._timers.start(group.join_timer, turn.now_ms + delay_ms)
        else:
            group.move_to(State.PREPARING, turn.wall_ms)
            if group.everybody_joined:
                self._complete_join(group, turn)
            else:
                self._timers.start(group.join_timer, turn.now_ms + group.rebalance_timeout_ms)

    def try_complete_join(self, group: ClassicGroup, turn: Turn) -> None:
        """End the join phase if all members have joined. Only its timer ends the first join phase of a group."""
        if group.state is State.PREPARING and group.initial_deadline_ms is None and group.everybody_joined:
            self._complete_join(group, turn)

    def join_time_is_up(self, group: ClassicGroup, turn: Turn) -> None:
        assert group.state is State.PREPARING
        limit_ms = group.initial_deadline_ms
        if limit_ms is not None and group.new_member_added and turn.now_ms < limit_ms:
            group.new_member_added = False
            delay_ms = self._settings.initial_rebalance_delay_ms
            self._timers.start(group.join_timer, min(turn.now_ms + delay_ms, limit_ms))
        else:
            self._complete_join(group, turn)

    def _complete_join(self, group: ClassicGroup, turn: Turn) -> None:
        self._timers.cancel(group.join_timer)
        # A static member keeps its place while it is away, until its session ends (KIP-345).
        absent = [m for m in group.members.values() if m.waiting_join is None and not m.is_static]
        for member in absent:
            self.remove(group, member, ErrorCode.UNKNOWN_MEMBER_ID, turn)

        if group.members and not group.elect_joined_leader():
            # Only silent static members are left, until their sessions end or one of them comes back.
            retry_ms = max(group.rebalance_timeout_ms, RETRY_MS_MIN)
            self._timers.start(group.join_timer, turn.now_ms + retry_ms)
            return

        group.start_generation(turn.wall_ms)
        if group.state is State.EMPTY:
            group.store(turn.decision)
            return
        for member in group.members.values():
            turn.answer(group.stop_waiting_for_join(member), joined(group, member))
            self.touch(member, turn.now_ms)
            member.is_new = False
            group.unsynced[member.id] = None
        self._timers.start(group.sync_timer, turn.now_ms + group.rebalance_timeout_ms)

    # The sync phase

    def mark_synced(self, group: ClassicGroup, member: Member) -> None:
        group.unsynced.pop(member.id, None)
        if not group.unsynced:
            self._timers.cancel(group.sync_timer)

    def assign(self, group: ClassicGroup, assignments: dict[str, bytes], turn: Turn) -> None:
        """Apply the leader's assignment. A member it left out gets nothing; unknown members are ignored."""
        for member in group.members.values():
            member.assignment = assignments.get(member.id, b"")
        group.move_to(State.STABLE, turn.wall_ms)
        group.store(turn.decision)
        for member in group.members.values():
            if member.waiting_sync is not None:
                turn.answer(member.waiting_sync, synced(group, member))
                member.waiting_sync = None
                # Its session may have ended without effect while it waited.
                self.touch(member, turn.now_ms)

    def give_up(self, group: ClassicGroup, turn: Turn) -> None:
        """Give up a generation that could not be stored."""
        for member in group.members.values():
            member.assignment = b""
        self.prepare(group, turn)

    def sync_time_is_up(self, group: ClassicGroup, turn: Turn) -> None:
        if group.unsynced:
            for member_id in list(group.unsynced):
                self.remove(group, group.members[member_id], ErrorCode.UNKNOWN_MEMBER_ID, turn)
            self.prepare(group, turn)

    def _answer_sync(self, member: Member, error: ErrorCode, turn: Turn) -> None:
        if member.waiting_sync is not None:
            turn.answer(member.waiting_sync, SyncGroupResponse(error_code=error))
            member.waiting_sync = None
            self.touch(member, turn.now_ms)
