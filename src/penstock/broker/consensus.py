"""This node's part in the metadata quorum: the shell around ``raft.Raft``, and what it agrees on, applied.

Every node has one, whether it has a vote or not; a node alone is a quorum of one and takes the same way.
The core decides and this carries out: the log (``quorum_log.py``), the stored promises, the messages
(``quorum_wire.py``), the snapshots (``quorum_snapshots.py``), the timer. As records are committed they are
applied to ``image``, and ``on_committed`` is told.

The active controller decides against its own image of all that was decided. ``propose`` appends a decision's
changes and answers when they are committed. So two requests in flight see each other's topics, and nobody is
told of a topic that could be taken back.

What a newcomer gets wrong: things happen to the core one at a time, and while a promise is being stored
nothing else may. So whatever comes in is queued (``_step``) and may be carried out later than the call that
brought it; and a callback made from here may propose again, which is queued behind what is under way.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker import quorum_wire as wire
from penstock.broker.connection import WAITING, Call
from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.broker.quorum_log import (
    BEFORE_ALL,
    METADATA_LOG_CONFIG,
    QUORUM_STATE,
    MetadataLog,
    encode_state,
    read_state,
    refuse_damage,
)
from penstock.broker.quorum_snapshots import Snapshots, difference
from penstock.decision import Decision
from penstock.environment import Environment, Timer
from penstock.log.log import Log
from penstock.log.names import write_partition_metadata
from penstock.metadata.image import Delta, Image
from penstock.metadata.topics import CLUSTER_METADATA_ID
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.messages import fetch as fetching
from penstock.protocol.messages import quorum as messages
from penstock.protocol.records import CorruptBatch
from penstock.protocol.schema import Message
from penstock.raft.events import (
    Append,
    AppendFetched,
    ChangeVoterRequest,
    DescribeAnswer,
    DescribeRequest,
    Effect,
    FetchAnswer,
    FetchRequest,
    Flush,
    HighWatermark,
    LoadSnapshot,
    Reply,
    Request,
    RoleChanged,
    Send,
    SnapshotRequest,
    StoreState,
    Truncate,
    WriteSnapshot,
)
from penstock.raft.quorum import Voter
from penstock.raft.raft import Raft, RaftSettings
from penstock.raft.storage import SnapshotId, StoredState

if TYPE_CHECKING:
    from penstock.broker.peers import Peers

# After a sync or a store that could not even be tried, or found no room.
RETRY_MS = 100
FULL_RETRY_MS = 1_000
# What a snapshot made unnecessary may still be on its way to a follower.
REMOVAL_DELAY_MS = 60_000
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class ConsensusSettings:
    raft: RaftSettings = field(default_factory=RaftSettings)
    # A snapshot is made when so much was committed since the last one (Kafka's
    # metadata.log.max.record.bytes.between.snapshots), or so many records, which cost time at start.
    snapshot_bytes: int = 20 * 1024 * 1024
    snapshot_records: int = 50_000


class _Waiting(NamedTuple):
    """Whoever made a proposal."""

    # Exclusive: answered when all below is committed.
    offset: int
    answer: Callable[[], None]
    lost: Callable[[], None]


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
    ) -> None:
        """``controllers`` are the nodes that found the cluster, with their internal addresses; none for a node
        alone, which needs no ``peers`` either. ``cluster_id`` is what the disk says, when it says one.

        Raises:
            ServeError: the metadata on the disk is damaged.
        """
        self._environment = environment
        self._files = environment.files
        self._peers = peers
        self._logger = logger
        self._on_committed = on_committed
        self._on_active = on_active
        self._on_failure = on_failure
        self._settings = settings or ConsensusSettings()
        self._cluster_id = cluster_id
        self._me = Voter(node_id, directory_id)
        self._controllers = dict(controllers)
        self._state_path = f"{directory}/{QUORUM_STATE}"

        if not lost_page_cache:
            refuse_damage(environment.files, directory)
        self._snapshots = Snapshots(environment, directory)
        loaded = self._snapshots.load(
            lambda path, why: logger.error("a snapshot of the metadata is damaged", path=path, error=why)
        )
        ids = self._snapshots.ids
        # Not "clean" on purpose: this log is small, and everything else rests on it.
        log = Log.open(
            environment,
            directory,
            METADATA_LOG_CONFIG,
            clean=False,
            log_start_offset=ids[0].end_offset if ids else None,
        )
        if not self._files.exists(directory):
            self._files.make_directory(directory)
            write_partition_metadata(self._files, directory, CLUSTER_METADATA_ID)
        self._log = MetadataLog(environment, log, self._me)
        self._log.begin_at(ids, () if loaded is None else loaded.voters)
        # What is committed, and so what clients may be told.
        self.image = Image() if loaded is None else loaded.image
        if loaded is not None:
            self._log.addresses.update(loaded.addresses)
        self._log.replay()
        self._remove_doomed()

        self._raft = Raft(
            self._me,
            tuple(controllers),
            log=self._log,
            stored=self._stored_state(),
            random=environment.random,
            settings=self._settings.raft,
        )
        # Leads, and has committed and applied a record of its epoch: only then may there be a controller.
        self.is_active = False
        self._waiting: deque[_Waiting] = deque()
        self._bytes_since_snapshot = 0
        self._records_since_snapshot = 0

        # What happened and was not told to the core yet, and what it wants done.
        self._happenings: deque[Callable[[int], list[Effect]]] = deque()
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

    def decided_image(self) -> Image:
        """All that was appended, be it committed or not."""
        changes = [change for batch in self._log.unapplied for change in batch.changes]
        return self.image.apply(changes)[0] if changes else self.image

    def check(self) -> None:
        """Assert what must hold between any two turns of the loop."""
        assert self.image.offset < max(1, self._raft.high_watermark), (self.image.offset, self.high_watermark)
        assert not self.is_active or self._raft.is_leader or self._is_busy
        assert self.is_active or not self._waiting or self._is_busy
        if not self._is_busy:
            self._raft.check()

    # Coming and going

    def start(self) -> None:
        if self._peers is not None:
            for id, address in self._addresses().items():
                if id != self._me.id:
                    self._peers.set_address(id, *address)
            self._peers.on_lost.append(self._peer_lost)
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
        if self._peers is not None and self._peer_lost in self._peers.on_lost:
            self._peers.on_lost.remove(self._peer_lost)

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

        False when the disk is full: the decision is void, and the controller that made it must be replaced.
        """
        if not self.is_active or not self._raft.is_leader:
            self._environment.spawn.soon(lost)
            return True
        if not decision.changes and not self._waiting:
            if self._raft.is_followed(self._environment.clock.now_ms()):
                answer(decision.response)
            else:
                # A process that was asleep may have been replaced, and says nothing more for certain.
                self._environment.spawn.soon(lost)
            return True
        if decision.changes:
            try:
                self._log.append_changes(decision.changes, self._raft.epoch)
            except OSError as error:
                if error.errno in NO_ROOM:
                    return False
                self._fail(f"cannot write the metadata log: {error}")
                raise
        # A decision without changes may rest on one that is not committed yet: it waits its turn too.
        self._waiting.append(_Waiting(self._log.end_offset, lambda: answer(decision.response), lost))
        if decision.changes:
            self._step(self._raft.log_changed)
        return True

    # Requests of other nodes and of operators: the handlers of ``handlers/quorum.py``

    def handle_fetch(self, request: fetching.FetchRequest, call: Call) -> Any:
        return self._handle(
            wire.read_fetch(request), request, call, lambda error: fetching.FetchResponse(error_code=error)
        )

    def handle_vote(self, request: messages.VoteRequest, call: Call) -> Any:
        return self._handle(
            wire.read_vote(request), request, call, lambda error: messages.VoteResponse(error_code=error)
        )

    def handle_begin(self, request: messages.BeginQuorumEpochRequest, call: Call) -> Any:
        asked = wire.read_begin_epoch(request)
        if asked is not None and request.leader_endpoints:
            endpoint = request.leader_endpoints[0]
            self._learn_address(asked.leader_id, (endpoint.host, endpoint.port))
        return self._handle(
            asked, request, call, lambda error: messages.BeginQuorumEpochResponse(error_code=error)
        )

    def handle_end(self, request: messages.EndQuorumEpochRequest, call: Call) -> Any:
        return self._handle(
            wire.read_end_epoch(request),
            request,
            call,
            lambda error: messages.EndQuorumEpochResponse(error_code=error),
        )

    def handle_fetch_snapshot(self, request: messages.FetchSnapshotRequest, call: Call) -> Any:
        return self._handle(
            wire.read_snapshot(request),
            request,
            call,
            lambda error: messages.FetchSnapshotResponse(error_code=error),
        )

    def handle_describe(self, request: messages.DescribeQuorumRequest, call: Call) -> Any:
        return self._handle(
            DescribeRequest(),
            request,
            call,
            lambda error: messages.DescribeQuorumResponse(error_code=error),
        )

    def handle_add_voter(self, request: messages.AddRaftVoterRequest, call: Call) -> Any:
        if request.listeners:
            endpoint = request.listeners[0]
            self._learn_address(request.voter_id, (endpoint.host, endpoint.port))
        voter = Voter(request.voter_id, request.voter_directory_id)
        return self._handle(
            ChangeVoterRequest(voter, False),
            request,
            call,
            lambda error: messages.AddRaftVoterResponse(error_code=error),
        )

    def handle_remove_voter(self, request: messages.RemoveRaftVoterRequest, call: Call) -> Any:
        voter = Voter(request.voter_id, request.voter_directory_id)
        return self._handle(
            ChangeVoterRequest(voter, True),
            request,
            call,
            lambda error: messages.RemoveRaftVoterResponse(error_code=error),
        )

    def _handle(
        self, asked: Request | None, request: Any, call: Call, refusal: Callable[[ErrorCode], Any]
    ) -> Any:
        if asked is None:
            return refusal(ErrorCode.INVALID_REQUEST)
        if self._is_closed:
            return refusal(ErrorCode.BROKER_NOT_AVAILABLE)
        ours, theirs = self._known_cluster_id(), getattr(request, "cluster_id", None)
        if ours and theirs and ours != theirs:
            return refusal(ErrorCode.INCONSISTENT_CLUSTER_ID)
        self._step(lambda now_ms: self._raft.request(asked, call, now_ms))
        return WAITING

    def _known_cluster_id(self) -> str | None:
        return self._cluster_id or self.image.cluster_id or None

    # One thing at a time

    def _step(self, happening: Callable[[int], list[Effect]]) -> None:
        """Let the core know of something, when its turn comes."""
        self._happenings.append(happening)
        if not self._is_busy:
            self._run()

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
                self._reply(effect)
            case Send():
                self._send(effect)
            case HighWatermark():
                self._commit(effect.offset)
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
            case WriteSnapshot():
                self._write_piece(effect)
            case LoadSnapshot():
                self._load(effect.snapshot_id)
            case StoreState():
                raise AssertionError("stored before anything else is done")

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

    def _store(self, state: StoredState) -> None:
        """Store a promise; everything else waits."""
        data = encode_state(state)

        def stored(_: None, error: Exception | None) -> None:
            if self._is_closed:
                return
            if error is None:
                self._run()
            elif isinstance(error, OSError) and error.errno in NO_ROOM:
                # A node that cannot promise does not take part, until it can.
                self._logger.error("the disk is full: this node takes no part in the quorum")
                self._environment.spawn.later(FULL_RETRY_MS, try_it)
            else:
                self._fail(f"cannot store the quorum's state: {error}")

        def try_it() -> None:
            self._environment.spawn.in_thread(
                lambda: self._files.replace(self._state_path, data), stored, lane="metadata"
            )

        try_it()

    def _append(self, effect: Append | AppendFetched) -> None:
        try:
            if isinstance(effect, Append):
                self._log.append_control(effect.records, effect.epoch, self._addresses())
            else:
                self._log.append_fetched(effect.records)
                self._learn_addresses()
        except CorruptBatch as error:
            self._logger.error("what the leader sent is damaged", error=str(error))
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(f"cannot write the metadata log: {error}")
                return
            self._logger.error("the disk is full: the metadata log cannot grow")
        else:
            self._is_log_changed = True
            return
        # Some of it may have been appended.
        self._effects.extend(self._raft.append_failed(self._environment.clock.now_ms()))
        self._is_log_changed = True

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

    def _remove_doomed(self) -> None:
        """Files of the log that nobody needs any more, once nobody reads them either."""
        log = self._log.log
        doomed, log.doomed = log.doomed, []
        if not doomed:
            return

        def remove() -> None:
            for path in doomed:
                self._files.forget(path)
                self._files.remove(path)

        self._environment.spawn.later(REMOVAL_DELAY_MS, remove)

    # The network

    def _send(self, effect: Send) -> None:
        request = effect.request
        node_id = effect.to
        peers = self._peers
        assert peers is not None, "a node alone has nobody to ask"
        letter = wire.write(request, self._known_cluster_id(), self._me, self._addresses())

        def done(response: Any | None) -> None:
            if self._is_closed:
                return
            if response is not None and response.error_code == ErrorCode.INCONSISTENT_CLUSTER_ID:
                self._logger.error("a controller belongs to another cluster", controller=node_id)
            elif isinstance(request, DescribeRequest) and response is not None:
                for node in response.nodes:
                    for endpoint in node.listeners[:1]:
                        self._learn_address(node.node_id, (endpoint.host, endpoint.port))
            answer = wire.read_answer(node_id, request, response)
            self._step(lambda now_ms: self._raft.answered(request, answer, now_ms))
            if response is None and peers.is_refused(node_id, letter.lane):
                self._peer_lost(node_id, letter.lane)

        peers.call(node_id, letter.lane, letter.message, letter.version, done, timeout_ms=letter.timeout_ms)

    def _peer_lost(self, node_id: int, _lane: str) -> None:
        """Nobody listens there any more: its process is gone."""
        self._step(lambda now_ms: self._raft.unreachable(node_id, now_ms))

    def _reply(self, effect: Reply) -> None:
        call, request, answer = effect
        if isinstance(answer, DescribeAnswer):
            call.answer(self._description(answer))
            return
        records: Any = b""
        size = 0
        if isinstance(request, FetchRequest) and isinstance(answer, FetchAnswer):
            if not answer.error and answer.diverging is None and answer.snapshot_id is None:
                records = self._log.read(request.offset, wire.FETCH_BYTES_MAX) or b""
        elif isinstance(request, SnapshotRequest) and not answer.error:
            piece = self._snapshots.piece_of(request.snapshot_id, request.position, wire.SNAPSHOT_CHUNK_BYTES)
            assert piece is not None, "the core knows only snapshots that are there"
            records, size = piece
        call.answer(wire.write_answer(request, answer, records, size))

    def _description(self, answer: DescribeAnswer) -> messages.DescribeQuorumResponse:
        wall_ms = self._environment.clock.wall_ms()
        since_ms = wall_ms - self._environment.clock.now_ms()
        standings = {
            replica: wire.Standing(
                replica,
                offset,
                since_ms + fetched_ms,
                since_ms + fetched_ms if offset >= self.high_watermark else -1,
            )
            for replica, offset, fetched_ms in self._raft.progress()
        }
        standings[self._me] = wire.Standing(
            self._me, answer.end_offset, wall_ms, wall_ms if self._raft.is_leader else -1
        )
        return wire.write_description(
            answer,
            self.high_watermark,
            [standings.pop(voter, wire.Standing(voter)) for voter in answer.voters],
            list(standings.values()),
            self._addresses(),
        )

    def _addresses(self) -> dict[int, tuple[str, int]]:
        # What this node was told at start is newer than what somebody wrote down once.
        return {**self._log.addresses, **self._controllers}

    def _learn_address(self, node_id: int, address: tuple[str, int]) -> None:
        self._log.addresses[node_id] = address
        self._learn_addresses()

    def _learn_addresses(self) -> None:
        if self._peers is not None:
            for id, address in self._log.addresses.items():
                if id != self._me.id and id not in self._controllers:
                    self._peers.set_address(id, *address)

    # What was agreed on

    def _commit(self, offset: int) -> None:
        """Apply all batches below this offset, as one: an image per batch would copy every topic for each."""
        unapplied = self._log.unapplied
        changes: list[Message] = []
        end_offset, epoch = self.image.offset + 1, self.image.epoch
        while unapplied and unapplied[0].end_offset <= offset:
            batch = unapplied.popleft()
            changes += batch.changes
            self._records_since_snapshot += batch.end_offset - end_offset
            self._bytes_since_snapshot += batch.size_bytes
            end_offset, epoch = batch.end_offset, batch.epoch
        if end_offset > self.image.offset + 1:
            self.image, delta = self.image.apply(changes, offset=end_offset - 1, epoch=epoch)
            self._on_committed(self.image, delta)
        if self._raft.is_established and not self.is_active:
            self.is_active = True
            self._logger.info("this node is the active controller", epoch=self._raft.epoch)
            self._on_active(True)
        while self._waiting and self._waiting[0].offset <= offset:
            self._waiting.popleft().answer()
        self._make_snapshot_when_due()

    def _role_changed(self, effect: RoleChanged) -> None:
        if effect.leader_id is not None and effect.leader_id != self._me.id:
            self._logger.info("the metadata quorum has a leader", leader=effect.leader_id, epoch=effect.epoch)
        if effect.role == "leader":
            return
        if self.is_active:
            self.is_active = False
            self._logger.info("this node is no longer the active controller", epoch=effect.epoch)
            self._on_active(False)
        waiting, self._waiting = self._waiting, deque()
        for proposal in waiting:
            proposal.lost()

    # Snapshots

    def _make_snapshot_when_due(self) -> None:
        settings = self._settings
        if self._snapshots.is_writing or (
            self._bytes_since_snapshot < settings.snapshot_bytes
            and self._records_since_snapshot < settings.snapshot_records
        ):
            return
        end_offset = self.image.offset + 1
        voters = next((voters for at, voters in reversed(self._log.voters) if at < end_offset), ())
        self._bytes_since_snapshot = self._records_since_snapshot = 0
        self._snapshots.write(
            SnapshotId(end_offset, self._log.epoch_before(end_offset)),
            self.image,
            voters,
            self._addresses(),
            self._snapshot_ended,
        )

    def _snapshot_ended(self, error: Exception | None) -> None:
        if error is not None:
            self._logger.error("a snapshot of the metadata could not be written", error=str(error))
            return
        self._log.snapshot_made(self._snapshots.ids)
        self._remove_doomed()
        # So much may have come meanwhile that the next one is due.
        self._make_snapshot_when_due()

    def _write_piece(self, effect: WriteSnapshot) -> None:
        try:
            self._snapshots.write_piece(effect.snapshot_id, effect.position, effect.data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(f"cannot write a snapshot of the metadata: {error}")
                return
            self._logger.error("the disk is full: a snapshot of the metadata cannot be fetched")

    def _load(self, snapshot_id: SnapshotId) -> None:
        """Continue from a snapshot of the leader's, whose log begins behind ours."""
        try:
            loaded = self._snapshots.finish_download(snapshot_id)
            self._log.start_over(snapshot_id, loaded.voters)
        except (CorruptBatch, DecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                self._fail(f"cannot write a snapshot of the metadata: {error}")
                return
            self._logger.error("a snapshot of the metadata could not be used", error=str(error))
            self._effects.extend(self._raft.snapshot_failed(self._environment.clock.now_ms()))
            return
        self._remove_doomed()
        self._log.addresses.update(loaded.addresses)
        self._learn_addresses()
        self._bytes_since_snapshot = self._records_since_snapshot = 0
        self._is_log_changed = True
        delta = difference(self.image, loaded.image)
        self.image = loaded.image
        self._on_committed(self.image, delta)
