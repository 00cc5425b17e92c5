"""This node's part in the metadata quorum: the shell around ``raft.Raft``.

Every node has one, voter or not; a single node is a quorum of one and takes the same path. The core decides and
this module carries out: the log (``metadata_log.py``), the stored vote and epoch, the timer. Messages to other
nodes go through ``conversation.py``; ``committed.py`` applies what is committed.

The active controller decides against its own image of everything decided. ``propose`` appends a decision's changes
and answers when they are committed. So two requests in flight see each other's topics, and no client is told of a
topic that could still disappear.

Careful: the core takes one event at a time, and none while a vote or epoch is being stored. So every event is
queued (``_step``) and may run later than the call that brought it. A callback made from here may propose again,
which is queued behind the current work.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.broker.counters import Durations
from penstock.broker.logs import Logger
from penstock.broker.network.connection import Call
from penstock.broker.network.peers import Peers
from penstock.broker.options import ServeError
from penstock.broker.quorum.addresses import AddressBook
from penstock.broker.quorum.committed import Committed
from penstock.broker.quorum.conversation import Conversation, Happening
from penstock.broker.quorum.metadata_log import (
    BEFORE_ALL,
    METADATA_LOG_CONFIG,
    QUORUM_STATE,
    MetadataLog,
    encode_state,
    read_state,
    refuse_damage,
    write_again,
)
from penstock.broker.quorum.other_clusters import OtherClusters
from penstock.broker.quorum.snapshots import Snapshots
from penstock.broker.storage.reserve import Reserve
from penstock.decision import Decision
from penstock.environment import NO_ROOM, Environment, Timer
from penstock.log.log import Log
from penstock.log.names import write_partition_metadata
from penstock.metadata.image import Delta, Image
from penstock.metadata.topics import CLUSTER_METADATA_ID
from penstock.protocol.records import CorruptBatch
from penstock.protocol.schema import Message
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

# After a flush that could not be started, and after a store that found no room.
RETRY_MS = 100
FULL_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class ConsensusSettings:
    raft: RaftSettings = field(default_factory=RaftSettings)
    # A snapshot is due after this many committed bytes (Kafka's metadata.log.max.record.bytes.between.snapshots) or
    # records, which take time to replay at start.
    snapshot_bytes: int = 20 * 1024 * 1024
    snapshot_records: int = 50_000


class Consensus:
    def __init__(
        self,
        environment: Environment,
        directory: str,
        *,
        node_id: int,
        directory_id: bytes,
        controllers: Mapping[int, tuple[str, int]],
        peers: Peers | None,
        lost_page_cache: bool,
        logger: Logger,
        on_committed: Callable[[Image, Delta], None],
        on_active: Callable[[bool], None],
        on_failure: Callable[[str], None],
        settings: ConsensusSettings | None = None,
        cluster_id: str | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """``controllers`` are the nodes that found the cluster, with their internal addresses; empty for a single
        node, which needs no ``peers`` either. ``cluster_id`` comes from the disk, None if it has none.

        Raises:
            ServeError: the metadata on the disk is damaged.
        """
        self._environment = environment
        self._files = environment.files
        self._logger = logger
        self._on_failure = on_failure
        self._cluster_id = cluster_id
        # The reserve of the disk that holds the log.
        self._reserve = reserve or Reserve(environment.files, directory)
        # The disk is too full to write what the quorum has decided.
        self.is_stuck = False
        # The full disk has been logged.
        self._has_told_of_no_room = False
        self._state_path = f"{directory}/{QUORUM_STATE}"
        settings = settings or ConsensusSettings()
        me = Voter(node_id, directory_id)

        if not lost_page_cache:
            refuse_damage(environment.files, directory)
            try:
                self._reserve.keeping(lambda: write_again(environment.files, directory))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
        self._snapshots = Snapshots(environment, directory, self._reserve.keeping)
        loaded = self._snapshots.load(
            lambda path, why: logger.error("a snapshot of the metadata is damaged", path=path, error=why)
        )
        ids = self._snapshots.ids
        # Always recovered, never taken as clean: this log is small, and everything else depends on it.
        log = self._reserve.keeping(
            lambda: Log.open(
                environment,
                directory,
                METADATA_LOG_CONFIG,
                clean=False,
                log_start_offset=ids[0].end_offset if ids else None,
            )
        )
        if not self._files.exists(directory):
            self._reserve.keeping(self._make_directory)
        self._log = MetadataLog(environment, log, me)
        if loaded is None:
            self._log.begin_at(ids, ())
        else:
            self._log.begin_at(ids, loaded.voters, loaded.removed)
            self._log.addresses.update(loaded.addresses)
        self._log.replay()
        self._log.remove_deleted_files()

        self._raft = Raft(
            me,
            tuple(controllers),
            log=self._log,
            stored=self._stored_state(),
            random=environment.random,
            settings=settings.raft,
        )
        self._addresses = AddressBook(node_id, controllers, self._log, peers)
        self.committed = Committed(
            Image() if loaded is None else loaded.image,
            self._log,
            self._snapshots,
            self._addresses,
            logger,
            on_committed=on_committed,
            on_active=on_active,
            later=self._later,
            snapshot_bytes=settings.snapshot_bytes,
            snapshot_records=settings.snapshot_records,
        )
        self._conversation = Conversation(
            self._raft,
            self._log,
            self._snapshots,
            self._addresses,
            peers,
            environment.clock,
            logger,
            cluster_id=self._known_cluster_id,
            strangers=OtherClusters(
                environment,
                controllers,
                node_id,
                cluster_id=self._known_cluster_id,
                on_found=self._is_of_another_cluster,
            ),
            tell=self._step,
        )

        # Events for the core, and effects of the core that are not carried out yet.
        self._happenings: deque[Happening] = deque()
        self._effects: deque[Effect] = deque()
        self._is_log_changed = False
        self._is_busy = False
        self._is_closed = False
        self._timer: Timer | None = None
        self._timer_at_ms = 0
        # From when a flush of the metadata log is given to a thread until its result is here.
        self.flush_durations = Durations()

    # State

    @property
    def leader_id(self) -> int | None:
        return self._raft.leader_id

    @property
    def epoch(self) -> int:
        return self._raft.epoch

    @property
    def high_watermark(self) -> int:
        return self._raft.high_watermark

    @property
    def is_voter(self) -> bool:
        return self._raft.is_voter

    @property
    def log_end_offset(self) -> int:
        return self._log.end_offset

    @property
    def image(self) -> Image:
        """The committed image, which clients may see."""
        return self.committed.image

    @property
    def is_active(self) -> bool:
        """Whether this node is the active controller."""
        return self.committed.is_active

    def progress(self) -> dict[int, int]:
        """How far each voter and observer has fetched, by node id; empty if this node does not lead."""
        return {replica.id: offset for replica, offset, _ in self._raft.progress()}

    def decided_image(self) -> Image:
        """The decided state, including changes that are not committed yet."""
        return self.committed.decided_image()

    def check(self) -> None:
        """Assert what must hold between any two turns of the loop."""
        assert self.image.offset < max(1, self._raft.high_watermark), (self.image.offset, self.high_watermark)
        assert not self.is_active or self._raft.is_leader or self._is_busy
        assert self.is_active or not self.committed.is_awaited or self._is_busy
        if not self._is_busy:
            self._raft.check()

    # Starting and stopping

    def start(self) -> None:
        self._conversation.start()
        if self._log.log.recovery_point < self._log.end_offset:
            # The core takes the whole log as durable. After a crash some of it may only be in the page cache.
            self._flush(lambda: self._step(self._raft.start))
        else:
            self._step(self._raft.start)

    def resign(self) -> None:
        """Hand leadership to another voter, before this node stops."""
        self._step(self._raft.resign)

    def close(self) -> None:
        if self._is_closed:
            return
        self._stop()
        try:
            self._log.log.close()
        except OSError as error:
            # Nothing is lost: what was confirmed is durable, and the next start recovers the log anyway.
            self._logger.error("the metadata log was not closed cleanly", error=str(error))
            self._log.log.abandon()

    def _stop(self) -> None:
        self._is_closed = True
        self._snapshots.close()
        if self._timer is not None:
            self._timer.cancel()
        self._conversation.close()

    def _known_cluster_id(self) -> str | None:
        return self._cluster_id or self.image.cluster_id or None

    def _is_of_another_cluster(self, other: str | None) -> None:
        path = os.path.dirname(os.path.dirname(self._state_path))
        self._fail(
            f"{path} belongs to the cluster {self._known_cluster_id()}, but the controllers belong to "
            f"{other or 'another'}; choose another --data-dir"
        )

    def _fail(self, message: str) -> None:
        """Stop for good: the disk or its data can no longer be trusted."""
        if not self._is_closed:
            self._stop()
            self._on_failure(message)

    # Deciding

    def propose(
        self, decision: Decision[Message], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> bool:
        """Append a decision of the controller. Call ``answer(response)`` once it is committed, or ``lost()`` if
        leadership is lost before that; then it may or may not be committed.

        False when the disk is full: the decision is void, and the controller that made it must be replaced. If
        there are other voters this node resigns, because one of them may have room.
        """
        if not self.is_active or not self._raft.is_leader:
            self._environment.spawn.soon(lost)
            return True
        if not decision.changes and not self.committed.is_awaited:
            if self._raft.is_followed(self._environment.clock.now_ms()):
                answer(decision.response)
            else:
                # A process that was paused may no longer be the leader, so it must not answer.
                self._environment.spawn.soon(lost)
            return True
        if decision.changes:
            changes, epoch = decision.changes, self._raft.epoch
            try:
                self._reserve.keeping(lambda: self._log.append_changes(changes, epoch))
            except OSError as error:
                if error.errno in NO_ROOM:
                    self._found_no_room("this node does not lead the quorum until there is some")
                    self._step(self._raft.resign)
                    return False
                self._fail(f"cannot write the metadata log: {error}")
                raise
            self._found_room()
        # A decision without changes may depend on one that is not committed yet, so it waits too.
        self.committed.wait(lambda: answer(decision.response), lost)
        if decision.changes:
            self._step(self._raft.log_changed)
        return True

    def handle(self, request: Any, call: Call) -> Any:
        """Handle a quorum request of another node or an operator."""
        return self._conversation.handle(request, call)

    # One event at a time

    def _step(self, happening: Happening) -> None:
        """Queue an event for the core."""
        self._happenings.append(happening)
        if not self._is_busy:
            self._run()

    def _later(self, work: Callable[[], None]) -> None:
        """Run ``work`` in another turn of the loop, in the queue of events."""

        def happening(_: int) -> list[Effect]:
            work()
            return []

        self._environment.spawn.soon(lambda: self._step(happening))

    def _run(self) -> None:
        """Carry out effects and pass on events until none are left, or a vote or epoch has to be stored."""
        clock = self._environment.clock
        effects = self._effects
        self._is_busy = True
        try:
            while not self._is_closed:
                if effects:
                    effect = effects.popleft()
                    if isinstance(effect, StoreState):
                        self._store(effect.state)
                        return
                    self._carry_out(effect)
                elif self._is_log_changed:
                    self._is_log_changed = False
                    effects.extend(self._raft.log_changed(clock.now_ms()))
                elif self._happenings:
                    effects.extend(self._happenings.popleft()(clock.now_ms()))
                else:
                    break
        except Exception as error:
            self._fail(f"the metadata quorum cannot go on: {error!r}")
            raise
        self._is_busy = False
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reply():
                self._conversation.reply(effect)
            case Send():
                self._conversation.send(effect)
            case HighWatermark():
                self.committed.commit(effect.offset, self._raft.epoch, self._raft.is_established)
            case AppendFetched() | Append():
                self._append(effect)
            case Flush():
                self._flush(self._flushed)
            case Truncate():
                self._logger.warning("truncating the metadata log", offset=effect.offset)
                self._log.truncate(effect.offset)
                self._is_log_changed = True
            case RoleChanged():
                self._role_changed(effect)
            case WriteSnapshot() | LoadSnapshot():
                self._take_snapshot(effect)
            case StoreState():
                raise AssertionError("stored before anything else is done")

    def _role_changed(self, effect: RoleChanged) -> None:
        if effect.leader_id is not None and effect.leader_id != self._raft.me.id:
            self._logger.info("the metadata quorum has a leader", leader=effect.leader_id, epoch=effect.epoch)
        if effect.role != "leader":
            self.committed.lead_no_more(effect.epoch)

    def _arm(self) -> None:
        """Set the timer for the core's next deadline. A timer that fires too early does no harm."""
        deadline_ms = self._raft.next_deadline_ms
        if self._is_closed or (self._timer is not None and self._timer_at_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_ms = max(0, deadline_ms - self._environment.clock.now_ms())
        self._timer_at_ms = deadline_ms
        self._timer = self._environment.spawn.later(delay_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._is_closed:
            self._step(self._raft.tick)

    # The disk

    def _make_directory(self) -> None:
        directory = os.path.dirname(self._state_path)
        self._files.make_directory(directory)
        write_partition_metadata(self._files, directory, CLUSTER_METADATA_ID)

    def _store(self, state: StoredState) -> None:
        """Store the vote and epoch; everything else waits."""
        data = encode_state(state)

        def stored(_: None, error: Exception | None) -> None:
            if self._is_closed:
                return
            if error is None:
                self._found_room()
                self._run()
            elif isinstance(error, OSError) and error.errno in NO_ROOM:
                # A node that cannot store its vote takes no part until it can.
                self.is_stuck = True
                self._found_no_room("this node takes no part in the quorum")
                self._environment.spawn.later(FULL_RETRY_MS, try_it)
            else:
                self._fail(f"cannot store the quorum's state: {error}")

        def try_it() -> None:
            self._environment.spawn.in_thread(
                lambda: self._reserve.keeping(lambda: self._files.replace(self._state_path, data)),
                stored,
                lane="metadata",
            )

        try_it()

    def _found_no_room(self, consequence: str) -> None:
        """Log a full disk once, until a write succeeds again."""
        if not self._has_told_of_no_room:
            self._has_told_of_no_room = True
            self._logger.error(f"the disk is full: {consequence}")

    def _found_room(self) -> None:
        self.is_stuck = self._has_told_of_no_room = False

    def _append(self, effect: Append | AppendFetched) -> None:
        try:
            if isinstance(effect, Append):
                records, epoch = effect.records, effect.epoch
                self._reserve.keeping(lambda: self._log.append_control(records, epoch, self._addresses.all()))
            else:
                self._log.append_fetched(effect.records)
                self._addresses.announce()
        except CorruptBatch as error:
            self._logger.error("the leader sent a damaged batch", error=str(error))
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(f"cannot write the metadata log: {error}")
                return
            # The next attempt has the room freed from the reserve.
            if not self._reserve.give():
                self.is_stuck = isinstance(effect, AppendFetched)
                self._found_no_room("the metadata log cannot grow")
        else:
            self._found_room()
            self._is_log_changed = True
            return
        # Some of the batches may have been appended.
        self._effects.extend(self._raft.append_failed(self._environment.clock.now_ms()))
        self._is_log_changed = True

    def _take_snapshot(self, effect: WriteSnapshot | LoadSnapshot) -> None:
        try:
            if isinstance(effect, WriteSnapshot):
                self.committed.write_piece(effect)
                return
            loaded = self.committed.load(effect.snapshot_id)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(f"cannot write a snapshot of the metadata: {error}")
                return
            self.is_stuck = True
            self._found_no_room("a snapshot of the metadata cannot be fetched")
            loaded = None
        if loaded is None:
            self._effects.extend(self._raft.snapshot_failed(self._environment.clock.now_ms()))
        else:
            self._found_room()
            self._is_log_changed = True
            self.committed.adopt(loaded)

    def _flush(self, done: Callable[[], None]) -> None:
        log = self._log.log
        if self._is_closed:
            return
        try:
            offset, work = log.prepare_flush()
        except OSError:
            # Most likely too many open files. No fsync has failed, so nothing is lost: try again.
            self._environment.spawn.later(RETRY_MS, lambda: self._flush(done))
            return

        clock = self._environment.clock
        began_us = clock.work_us()

        def flushed(_: None, error: Exception | None) -> None:
            self.flush_durations.add(clock.work_us() - began_us)
            if self._is_closed:
                return
            if error is not None:
                self._fail(f"fsync of the metadata log failed: {error}")
                return
            log.flushed(offset)
            done()

        self._environment.spawn.in_thread(work, flushed, lane="metadata")

    def _flushed(self) -> None:
        self._step(lambda now_ms: self._raft.flushed(self._log.log.recovery_point, now_ms))

    def _stored_state(self) -> StoredState:
        stored = read_state(self._files, self._state_path)
        if stored is None:
            voters = self._log.voters
            if voters and voters[-1][0] != BEFORE_ALL:
                raise ServeError(
                    f"{self._state_path} is missing: this node has lost its votes. Empty the data directory, "
                    "so that it joins the cluster as a new node"
                )
            return StoredState()
        return stored
