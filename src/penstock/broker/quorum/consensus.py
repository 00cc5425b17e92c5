"""This node's part in the metadata quorum: the shell around ``raft.Raft``.

Every node has one, whether it has a vote or not; a node alone is a quorum of one and takes the same way.
The core decides and this carries out: the log (``metadata_log.py``), the stored promises, the timer. What it
says to others goes through ``conversation.py``; what it says is committed is applied by
``committed.py``.

The active controller decides against its own image of all that was decided. ``propose`` appends a decision's
changes and answers when they are committed. So two requests in flight see each other's topics, and nobody is
told of a topic that could be taken back.

What a newcomer gets wrong: things happen to the core one at a time, and while a promise is being stored
nothing else may. So whatever comes in is queued (``_step``) and may be carried out later than the call that
brought it; and a callback made from here may propose again, which is queued behind what is under way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

# After a sync or a store that could not even be tried, or found no room.
RETRY_MS = 100
FULL_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class ConsensusSettings:
    raft: RaftSettings = field(default_factory=RaftSettings)
    # A snapshot is made when so much was committed since the last one (Kafka's
    # metadata.log.max.record.bytes.between.snapshots), or so many records, which cost time at start.
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
        """``controllers`` are the nodes that found the cluster, with their internal addresses; none for a node
        alone, which needs no ``peers`` either. ``cluster_id`` is what the disk says, when it says one.

        Raises:
            ServeError: the metadata on the disk is damaged.
        """
        self._environment = environment
        self._files = environment.files
        self._logger = logger
        self._on_failure = on_failure
        self._cluster_id = cluster_id
        # Of the disk that the log is on.
        self._reserve = reserve or Reserve(environment.files, directory)
        # What the others have decided cannot be written here, for want of room.
        self.is_stuck = False
        # Somebody has been told that there is none.
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
        # Not "clean" on purpose: this log is small, and everything else rests on it.
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

        # What happened and was not told to the core yet, and what it wants done.
        self._happenings: deque[Happening] = deque()
        self._effects: deque[Effect] = deque()
        self._is_log_changed = False
        self._is_busy = False
        self._is_closed = False
        self._timer: Timer | None = None
        self._timer_at_ms = 0

    # What is known

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
        """What is committed, and so what clients may be told."""
        return self.committed.image

    @property
    def is_active(self) -> bool:
        """Whether there may be a controller on this node."""
        return self.committed.is_active

    def decided_image(self) -> Image:
        """All that was appended, be it committed or not."""
        return self.committed.decided_image()

    def check(self) -> None:
        """Assert what must hold between any two turns of the loop."""
        assert self.image.offset < max(1, self._raft.high_watermark), (self.image.offset, self.high_watermark)
        assert not self.is_active or self._raft.is_leader or self._is_busy
        assert self.is_active or not self.committed.is_awaited or self._is_busy
        if not self._is_busy:
            self._raft.check()

    # Coming and going

    def start(self) -> None:
        self._conversation.start()
        if self._log.log.recovery_point < self._log.end_offset:
            # What a crash left in the page cache counts as durable from here on, so it has to be.
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
            # Nothing is lost: what was promised is durable, and the next start looks at everything anyway.
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
            f"{path} belongs to the cluster {self._known_cluster_id()}, and the controllers to "
            f"{other or 'another'}; choose another --data-dir"
        )

    def _fail(self, message: str) -> None:
        """The disk, or what is on it, cannot be trusted any more."""
        if not self._is_closed:
            self._stop()
            self._on_failure(message)

    # Deciding

    def propose(
        self, decision: Decision[Message], answer: Callable[[Any], None], lost: Callable[[], None]
    ) -> bool:
        """Append a decision of the controller; ``answer(response)`` once it is committed, or ``lost()`` when
        leadership was lost before, and nobody knows what will come of it.

        False when the disk is full: the decision is void, and the controller that made it must be replaced. If
        there are other voters this node stands back for one of them, which may have room.
        """
        if not self.is_active or not self._raft.is_leader:
            self._environment.spawn.soon(lost)
            return True
        if not decision.changes and not self.committed.is_awaited:
            if self._raft.is_followed(self._environment.clock.now_ms()):
                answer(decision.response)
            else:
                # A process that was asleep may have been replaced, and says nothing more for certain.
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
        # A decision without changes may rest on one that is not committed yet: it waits its turn too.
        self.committed.wait(lambda: answer(decision.response), lost)
        if decision.changes:
            self._step(self._raft.log_changed)
        return True

    def handle(self, request: Any, call: Call) -> Any:
        """A request of another node or of an operator, for the quorum."""
        return self._conversation.handle(request, call)

    # One thing at a time

    def _step(self, happening: Happening) -> None:
        """Let the core know of something, when its turn comes."""
        self._happenings.append(happening)
        if not self._is_busy:
            self._run()

    def _later(self, work: Callable[[], None]) -> None:
        """Do something in another turn of the loop, as if the core had asked for it then."""

        def happening(_: int) -> list[Effect]:
            work()
            return []

        self._environment.spawn.soon(lambda: self._step(happening))

    def _run(self) -> None:
        """Carry out effects and tell of happenings until nothing is left, or a promise has to be stored."""
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
                self._logger.warning("the metadata log is cut back", offset=effect.offset)
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
        """Be woken when the core has something to do. A timer that is too early does no harm."""
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
        """Store a promise; everything else waits."""
        data = encode_state(state)

        def stored(_: None, error: Exception | None) -> None:
            if self._is_closed:
                return
            if error is None:
                self._found_room()
                self._run()
            elif isinstance(error, OSError) and error.errno in NO_ROOM:
                # A node that cannot promise does not take part, until it can.
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
        """Say it once, until something could be written again."""
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
            self._logger.error("what the leader sent is damaged", error=str(error))
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(f"cannot write the metadata log: {error}")
                return
            # With room from the reserve the next attempt fares better.
            if not self._reserve.give():
                self.is_stuck = isinstance(effect, AppendFetched)
                self._found_no_room("the metadata log cannot grow")
        else:
            self._found_room()
            self._is_log_changed = True
            return
        # Some of it may have been appended.
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
            # Too many open files, most likely. Nothing was tried, so nothing is lost: again in a moment.
            self._environment.spawn.later(RETRY_MS, lambda: self._flush(done))
            return

        def flushed(_: None, error: Exception | None) -> None:
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
                    f"{self._state_path} is missing: this node no longer knows what it voted for. Empty the "
                    "data directory, and it joins the cluster anew"
                )
            return StoredState()
        return stored
