"""One simulated node of a quorum: a disk, and a process that carries out the effects of its core.

It is the counterpart of the shell (``broker/quorum/consensus.py``): effects in order, nothing else while a state
is being stored, a flush that takes time. An event scheduled for a process must not reach the next process after a
crash, so it carries the incarnation (``life``) it is for.
"""

from __future__ import annotations

import random
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.raft.events import (
    Append,
    AppendFetched,
    Effect,
    Flush,
    HighWatermark,
    LoadSnapshot,
    Reply,
    RoleChanged,
    Send,
    StoreState,
    Truncate,
    WriteSnapshot,
)
from penstock.raft.quorum import Voter
from penstock.raft.raft import Raft
from penstock.raft.settings import RaftSettings
from penstock.raft.storage import StoredState
from penstock.sim.cores.raft_ledger import Ledger
from penstock.sim.cores.raft_log import Entry, SimLog
from penstock.sim.cores.raft_world import World
from penstock.sim.report import Violation

if TYPE_CHECKING:
    from penstock.sim.cores.raft_network import Call, Network

# Deadline of a role that waits for nothing.
NEVER_MS = 1 << 60


class Node:
    __slots__ = (
        "_controllers",
        "_deferred",
        "_ledger",
        "_network",
        "_raft_type",
        "_tick_at_ms",
        "_world",
        "directory",
        "id",
        "inbound",
        "is_busy",
        "is_up",
        "life",
        "log",
        "on_storing",
        "paused_until_ms",
        "raft",
        "stored",
    )

    def __init__(
        self,
        id: int,
        world: World,
        network: Network,
        ledger: Ledger,
        *,
        raft_type: type[Raft],
        controllers: Sequence[int],
    ) -> None:
        self.id = id
        self._world = world
        self._network = network
        self._ledger = ledger
        self._raft_type = raft_type
        self._controllers = controllers
        # Called when it begins to store a state.
        self.on_storing: Callable[[Node], None] = lambda _: None
        # The disk.
        self.directory = b""
        self.stored = StoredState()
        self.log = SimLog()
        # The process.
        self.life = 0
        self.is_up = False
        self.raft: Raft | None = None
        self._tick_at_ms = -1
        self.paused_until_ms = 0
        # While a state is being stored: deferred events.
        self.is_busy = False
        self._deferred: deque[Callable[[int], list[Effect]]] = deque()
        # Requests that wait for its response.
        self.inbound: dict[int, Call] = {}

    @property
    def me(self) -> Voter:
        return Voter(self.id, self.directory)

    @property
    def is_responsive(self) -> bool:
        """Whether it handles events at once."""
        return not self.is_busy and self.paused_until_ms <= self._world.now_ms

    # Lives

    def boot(self, life: int) -> None:
        if self.is_up or self.life != life:
            return
        self.is_up = True
        self.paused_until_ms = 0
        self.log.synced_offset = self.log.end_offset
        self.raft = self._raft_type(
            self.me,
            self._controllers,
            log=self.log,
            stored=self.stored,
            random=random.Random(self._world.cores_draw.getrandbits(32)),
            settings=RaftSettings(),
        )
        self.step(self.life, self.raft.start)

    def end(self) -> None:
        """End the process; everything it had not written is lost."""
        self.life += 1
        self.is_up = self.is_busy = False
        self.raft = None
        self._tick_at_ms = -1
        self._deferred.clear()

    def get_disk(self) -> None:
        """Replace the disk by an empty one."""
        self.directory = self._world.disk_draw.randbytes(4)
        self.stored = StoredState()
        self.log = SimLog()

    def lose_unsynced(self) -> None:
        """Lose some or all of what was not synced."""
        self.log.truncate(self._world.disk_draw.randint(self.log.synced_offset, self.log.end_offset))

    # One thing at a time

    def step(self, life: int, happening: Callable[[int], list[Effect]]) -> None:
        """Pass an event to the process, unless it has been replaced."""
        if self.life != life or not self.is_up:
            return
        world = self._world
        if self.paused_until_ms > world.now_ms:
            world.later(self.paused_until_ms - world.now_ms, self.step, life, happening)
        elif self.is_busy:
            self._deferred.append(happening)
        else:
            try:
                self._carry_out(happening(world.now_ms))
            except AssertionError as error:
                self._stopped(error)

    def _stopped(self, error: AssertionError) -> None:
        """Report a core's broken invariant."""
        if isinstance(error, Violation):
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._ledger.fail(
            f"node {self.id} stopped in {frame.name}: {error or frame.line}", self._world.now_ms
        )

    def _carry_out(self, effects: list[Effect], place: int = 0) -> None:
        """Carry out the effects in order; continue later when a state has to be stored first."""
        raft = self.raft
        assert raft is not None
        ledger = self._ledger
        now_ms = self._world.now_ms
        log_changed = False
        while place < len(effects):
            effect = effects[place]
            place += 1
            match effect:
                case Send():
                    self._network.send(self, effect)
                case Reply():
                    self._network.reply(self, effect)
                case StoreState():
                    self._store(effects, place)
                    return
                case Append() | AppendFetched():
                    self._append(effect)
                    log_changed = True
                case Truncate():
                    ledger.truncating(self, effect.offset, now_ms)
                    self.log.truncate(effect.offset)
                    self._world.counts["truncations"] += 1
                    log_changed = True
                case Flush():
                    self._flush()
                case HighWatermark():
                    ledger.high_watermark(self, effect.offset, now_ms)
                case RoleChanged():
                    if effect.role == "leader":
                        self._world.counts["elections"] += 1
                    ledger.role_changed(self, effect, now_ms)
                case WriteSnapshot():
                    ledger.downloads[self.id] = effect.data[0]
                case LoadSnapshot():
                    self._world.counts["snapshots"] += 1
                    self.log.load(effect.snapshot_id, ledger.downloads[self.id])
                    log_changed = True
        if log_changed:
            self._carry_out(raft.log_changed(now_ms))
            return
        raft.check()
        ledger.check(self, now_ms)
        self._arm(raft)

    # The clock

    def _arm(self, raft: Raft) -> None:
        now_ms = self._world.now_ms
        deadline_ms = raft.next_deadline_ms
        if self._tick_at_ms <= now_ms or deadline_ms < self._tick_at_ms:
            self._tick_at_ms = max(deadline_ms, now_ms + 1)
            if deadline_ms < NEVER_MS:
                self._world.later(self._tick_at_ms - now_ms, self._tick, self.life, self._tick_at_ms)

    def _tick(self, life: int, due_ms: int) -> None:
        if self.life == life and self._tick_at_ms == due_ms and self.raft is not None:
            self.step(life, self.raft.tick)

    # The disk

    def append(self, payload: object, count: int) -> None:
        """Append records of the leader's own."""
        raft = self.raft
        assert raft is not None
        for _ in range(count):
            self.log.append(Entry(raft.epoch, payload))
            self._ledger.grew(self, self.log.end_offset - 1, self._world.now_ms)
        self.step(self.life, raft.log_changed)

    def _append(self, effect: Append | AppendFetched) -> None:
        now_ms = self._world.now_ms
        first = self.log.end_offset
        if isinstance(effect, Append):
            self._ledger.appended(self, effect, now_ms)
            self.log.append(Entry(effect.epoch, effect.records))
        else:
            for entry in effect.records:
                self.log.append(entry)
        self._ledger.grew(self, first, now_ms)

    def _store(self, effects: list[Effect], place: int) -> None:
        """Store a state, which takes a while; it is the effect before ``place``."""
        world = self._world
        self.is_busy = True
        self.on_storing(self)
        world.later(world.disk_draw.randrange(world.swarm.sync_ms), self._stored, self.life, effects, place)

    def _stored(self, life: int, effects: list[Effect], place: int) -> None:
        if self.life != life:
            return
        effect = effects[place - 1]
        assert isinstance(effect, StoreState)
        self.stored = effect.state
        self.is_busy = False
        try:
            self._carry_out(effects, place)
        except AssertionError as error:
            self._stopped(error)
        while self._deferred and not self.is_busy and self.life == life:
            self.step(life, self._deferred.popleft())

    def _flush(self) -> None:
        world = self._world
        self.log.begin_sync()
        world.later(1 + world.disk_draw.randrange(world.swarm.sync_ms), self._synced, self.life)

    def _synced(self, life: int) -> None:
        if self.life != life or self.raft is None:
            return
        self.log.end_sync()
        raft = self.raft
        self.step(life, lambda now_ms: raft.flushed(self.log.synced_offset, now_ms))
