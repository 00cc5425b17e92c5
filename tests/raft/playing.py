"""One node of a quorum in a test's hands: it carries out what the core wants, and shows what it wanted."""

from __future__ import annotations

import random
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.raft.events import (
    Answer,
    Append,
    AppendFetched,
    Effect,
    FetchAnswer,
    FetchRequest,
    LoadSnapshot,
    Reply,
    Request,
    Send,
    Truncate,
    VoteAnswer,
    VoteRequest,
    VotersChange,
)
from penstock.raft.quorum import Voter, voters_of
from penstock.raft.raft import Raft
from penstock.raft.settings import RaftSettings
from penstock.raft.storage import StoredState
from penstock.sim.cores.raft_log import Entry, SimLog

NONE = ErrorCode.NONE


def voter(id: int, life: int = 0) -> Voter:
    """A node with its first disk, or a later one."""
    return Voter(id, bytes((id, life)))


THREE = voters_of(voter(id) for id in (1, 2, 3))
FIVE = voters_of(voter(id) for id in (1, 2, 3, 4, 5))


def log_of(*epochs: int, voters: tuple[Voter, ...] = THREE) -> SimLog:
    """A durable log with an entry of each of these epochs, the first of them naming the voters."""
    log = SimLog()
    for epoch in epochs:
        log.append(Entry(epoch, (VotersChange(voters),) if log.end_offset == 0 else log.end_offset))
    log.synced_offset = log.end_offset
    return log


class Player:
    """Node 1, unless it is said otherwise. Every method returns the effects, carried out already."""

    def __init__(
        self,
        log: SimLog | None = None,
        *,
        me: Voter | None = None,
        controllers: tuple[int, ...] = (1, 2, 3),
        stored: StoredState | None = None,
        **settings: Any,
    ) -> None:
        self.log = log or SimLog()
        self.now_ms = 0
        self.raft = Raft(
            me or voter(1),
            controllers,
            log=self.log,
            stored=stored or StoredState(),
            random=random.Random(1),
            settings=RaftSettings(**settings),
        )
        self.token = 0
        self.did = self.carry_out(self.raft.start(0))

    def carry_out(self, effects: list[Effect]) -> list[Effect]:
        done = list(effects)
        for effect in effects:
            match effect:
                case Append():
                    self.log.append(Entry(effect.epoch, effect.records))
                case AppendFetched():
                    for entry in effect.records:
                        self.log.append(entry)
                case Truncate():
                    self.log.truncate(effect.offset)
                case LoadSnapshot():
                    self.log.load(effect.snapshot_id, [(0, THREE)])
                case _:
                    continue
            done += self.carry_out(self.raft.log_changed(self.now_ms))
        self.raft.check()
        return done

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass, with all that is due on the way."""
        end_ms = self.now_ms + ms
        done: list[Effect] = []
        while self.raft.next_deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, self.raft.next_deadline_ms)
            done += self.carry_out(self.raft.tick(self.now_ms))
        self.now_ms = end_ms
        return done

    def ask(self, request: Request) -> list[Effect]:
        self.token += 1
        return self.carry_out(self.raft.request(request, self.token, self.now_ms))

    def answer(self, request: Request, answer: Answer | None) -> list[Effect]:
        return self.carry_out(self.raft.answered(request, answer, self.now_ms))

    def propose(self, count: int = 1) -> list[Effect]:
        for _ in range(count):
            self.log.append(Entry(self.raft.epoch, f"entry {self.log.end_offset}"))
        return self.carry_out(self.raft.log_changed(self.now_ms))

    def flush(self) -> list[Effect]:
        self.log.begin_sync()
        self.log.end_sync()
        return self.carry_out(self.raft.flushed(self.log.synced_offset, self.now_ms))

    # Whole scenes

    def stand(self) -> list[Effect]:
        """Wait until it stands, and let all others say that they would elect it."""
        done: list[Effect] = []
        while not sent(done, VoteRequest):
            done += self.wait(100)
        return [
            effect
            for request in sent(done, VoteRequest)
            for effect in self.answer(request, VoteAnswer(NONE, request.epoch, None, True))
        ]

    def be_elected(self) -> list[Effect]:
        done: list[Effect] = []
        for request in sent(self.stand(), VoteRequest):
            done += self.answer(request, VoteAnswer(NONE, request.epoch, None, True))
        assert self.raft.is_leader
        return done

    def fetched_by(self, replica: Voter, offset: int, *, max_wait_ms: int = 500) -> list[Effect]:
        """A fetch by a replica whose log is the beginning of ours."""
        epoch = self.log.at(offset - 1).epoch if offset > self.log.start_offset else self.log.start_epoch
        return self.ask(FetchRequest(self.raft.epoch, replica, offset, epoch, 0, max_wait_ms))


def sent(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.request for e in effects if isinstance(e, Send) and isinstance(e.request, kind)]


def replies(effects: list[Effect]) -> list[Any]:
    return [effect.answer for effect in effects if isinstance(effect, Reply)]


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def nothing_new(epoch: int, leader: int, high_watermark: int) -> FetchAnswer:
    return FetchAnswer(NONE, epoch, leader, high_watermark, records=[])
