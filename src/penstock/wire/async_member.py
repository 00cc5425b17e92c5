"""A member of a consumer group in an asyncio loop: joins, keeps its place, and hears what it may read.

The callbacks are coroutines, or None. ``on_revoked`` gets partitions that the member has to give up: finish with
them and commit; until it returns the member stays in the group, within the group's rebalance timeout. ``on_lost``
gets partitions that others may have already. Callbacks run one at a time, in the order of the events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias

from penstock.model import TopicPartition
from penstock.protocol.messages.groups import JoinGroupRequest, SyncGroupRequest
from penstock.protocol.schema import Message
from penstock.wire import calls, coordinators
from penstock.wire.async_client import AsyncClient
from penstock.wire.calls import Call
from penstock.wire.coordinators import Kind
from penstock.wire.errors import StaleMember, WireError
from penstock.wire.links import Channel, Lane
from penstock.wire.membership import (
    Assigned,
    Event,
    Lost,
    Membership,
    MembershipSettings,
    Revoked,
    State,
)
from penstock.wire.transactions import NO_MEMBER, GroupMember

OnPartitions: TypeAlias = Callable[[list[TopicPartition]], Awaitable[None]]

# How often the leader looks whether its topics have more partitions, or exist by now.
TOPICS_MS = 30_000
# The first version of JoinGroup that names a static member (KIP-345).
STATIC_MEMBERS = 5

# A JoinGroup waits for the other members, so members that share a client need connections of their own. The numbers
# below are those of long polls.
_lanes = count(1000)


class AsyncMember:
    """Joins when it is entered, or by ``start``. A final error ends it: see ``error`` and ``ended``."""

    def __init__(
        self,
        client: AsyncClient,
        group: str,
        topics: Iterable[str],
        settings: MembershipSettings | None = None,
        *,
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        topics_ms: int = TOPICS_MS,
    ) -> None:
        self._client = client
        self._membership = Membership(group, topics, settings or MembershipSettings())
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._topics_ms = topics_ms
        self._topics_due_ms = 0
        self._lane = Lane(Channel.CONTROL, next(_lanes))
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> AsyncMember:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    @property
    def owned(self) -> list[TopicPartition]:
        return sorted(self._membership.owned)

    @property
    def member(self) -> GroupMember:
        """What to commit as, anywhere: the coordinator accepts it from any connection, in this generation."""
        return self._membership.member

    @property
    def state(self) -> State:
        return self._membership.state

    @property
    def error(self) -> BaseException | None:
        """Why it ended, if not by ``close``: the group refused it, or a callback failed."""
        return self._membership.error or self._error

    async def ended(self) -> None:
        """Wait until it is no member any more. Raises ``error`` if it did not leave by itself."""
        if self._running is not None:
            await asyncio.wait([self._running])
        if self.error is not None:
            raise self.error

    async def commit(self, offsets: Mapping[TopicPartition, int], *, metadata: str = "") -> None:
        """Commit offsets in the current generation. Raises StaleMember when there is none or it is over."""
        member = self.member
        if member == NO_MEMBER:
            raise StaleMember(f"group {self._membership.group} has gone on without this member")
        await self._client.do(calls.commit(self._membership.group, offsets, metadata=metadata, member=member))

    async def close(self) -> None:
        """Give up all partitions, with ``on_revoked``, and leave. A static member stays until its session ends."""
        if self._running is None:
            return
        self._membership.leave()
        self._wake.set()
        try:
            await asyncio.wait([self._running])
        finally:
            # If the caller does not want to wait: the session ends by itself.
            self._running.cancel()

    # Private

    async def _run(self) -> None:
        asking: asyncio.Task[Any] | None = None
        telling: asyncio.Task[None] | None = None
        counting: asyncio.Task[dict[str, int]] | None = None
        waking: asyncio.Task[Any] | None = None
        member, shell = self._membership, self._client.shell
        loop = asyncio.get_running_loop()
        try:
            while True:
                now_ms = shell.now_ms()
                member.tick(now_ms)
                if asking is not None and (asking.done() or self._is_in_the_way(asking)):
                    self._answer(asking, now_ms)
                    asking = None
                if telling is not None and telling.done():
                    telling.result()
                    telling = None
                    if isinstance(self._events.popleft(), Revoked):
                        member.released()
                self._events += member.take_events()
                if telling is None and self._events:
                    telling = loop.create_task(self._tell(self._events[0]))
                if counting is not None and counting.done():
                    self._counted(counting.result(), now_ms)
                    counting = None
                if counting is None:
                    names = self._names_to_count(now_ms)
                    counting = None if names is None else loop.create_task(self._count(names))
                if asking is None:
                    request = member.next_request(shell.now_ms())
                    if request is not None:
                        asking = loop.create_task(self._client.do(self._call(request)))
                if member.state in (State.LEFT, State.FAILED) and not self._events and asking is None:
                    return
                if waking is None or waking.done():
                    self._wake.clear()
                    waking = loop.create_task(self._wake.wait())
                due_ms = member.due_ms()
                timeout_s = None if due_ms is None else max(0.0, (due_ms - shell.now_ms()) / 1000)
                if member.is_leader and member.state is State.STABLE and counting is None:
                    until_s = max(0.0, (self._topics_due_ms - shell.now_ms()) / 1000)
                    timeout_s = until_s if timeout_s is None else min(timeout_s, until_s)
                waiting = [task for task in (asking, telling, counting, waking) if task is not None]
                await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except Exception as error:
            # A callback failed, or the client was closed.
            self._error = error
        finally:
            for task in (asking, telling, counting, waking):
                if task is not None:
                    task.cancel()
            self._membership.owned.clear()
            shell.core.links.hang_up(self._lane)
            shell.act_soon()

    def _is_in_the_way(self, asking: asyncio.Task[Any]) -> bool:
        """A member that leaves does not wait until the others have joined."""
        is_waiting = isinstance(self._membership.in_flight, JoinGroupRequest | SyncGroupRequest)
        return self._membership.state is State.LEAVING and is_waiting and not asking.done()

    def _answer(self, asking: asyncio.Task[Any], now_ms: int) -> None:
        response = None
        if asking.done():
            response = asking.result()
        else:
            asking.cancel()
            self._client.shell.core.links.hang_up(self._lane)
        if response is None:
            self._membership.unanswered(now_ms)
        else:
            self._membership.answered(response, now_ms)
        if self._membership.has_moved:
            self._membership.has_moved = False
            self._client.shell.core.cluster.coordinators.pop(self._membership.group, None)

    def _call(self, request: Message) -> Call[Any]:
        settings, group = self._membership.settings, self._membership.group
        is_join = isinstance(request, JoinGroupRequest)
        waits = is_join or isinstance(request, SyncGroupRequest)
        version_min = STATIC_MEMBERS if is_join and settings.instance_id is not None else 0
        return Call(
            f"keeping the membership in group {group}",
            lambda core, task: coordinators.ask(
                core,
                task,
                Kind.GROUP,
                group,
                request.KEY,
                request,
                version_min=version_min,
                channel=self._lane,
                patience_ms=settings.rebalance_timeout_ms if waits else 0,
            ),
        )

    async def _tell(self, event: Event) -> None:
        match event:
            case Assigned():
                callback = self._on_assigned
            case Revoked():
                callback = self._on_revoked
            case Lost():
                callback = self._on_lost
        if callback is not None:
            await callback(event.partitions)

    def _names_to_count(self, now_ms: int) -> list[str] | None:
        member = self._membership
        if member.unknown_topics is not None:
            return member.unknown_topics
        if member.is_leader and member.state is State.STABLE and now_ms >= self._topics_due_ms:
            return member.led_topics
        return None

    async def _count(self, names: list[str]) -> dict[str, int]:
        try:
            found = await self._client.do(calls.topics(names))
        except WireError:
            if self._client.shell.is_closed:
                raise
            # One of them is forbidden, or the cluster is away: the members of the others go on.
            return {}
        return {name: len(info.partitions) for name, info in found.items()}

    def _counted(self, counts: dict[str, int], now_ms: int) -> None:
        member = self._membership
        self._topics_due_ms = now_ms + self._topics_ms
        if member.unknown_topics is not None:
            member.assign(counts)
        elif counts and counts != member.counts:
            member.rejoin()
