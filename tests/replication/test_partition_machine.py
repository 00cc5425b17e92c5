"""A leader under any order of events, checked against what it was told and nothing else.

The machine is the controller, the other replicas and the network. It knows for certain what the leader can
only guess: which of the proposals it was sent are committed. Every high watermark is compared with the ends
of everyone who is in sync for the controller, whether or not the leader has heard of that.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.protocol.errors import ErrorCode
from penstock.replication.events import Assignment, IsrProposal
from penstock.replication.partition import Partition
from tests.replication.making import LAG_MAX_MS

ME = 1
OTHERS = (2, 3)
EVERYONE = (ME, *OTHERS)
MIN_ISR = 2


class LeaderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.brokers: dict[int, int | None] = {broker: 10 for broker in EVERYONE}
        self.partition = Partition(ME, live=self.brokers.get, lag_max_ms=LAG_MAX_MS, min_isr=MIN_ISR)
        self.end_offset = 0
        # What the followers really have, and what the controller has committed.
        self.ends = {broker: 0 for broker in OTHERS}
        self.truth = Assignment(ME, 1, 1, EVERYONE, EVERYONE)
        # Sent and not yet handled; handled but not yet answered; the newest first heard of by image.
        self.sent: list[IsrProposal] = []
        self.answers: list[tuple[IsrProposal, int, Assignment | None]] = []
        self.high_watermark = 0

    @initialize(isr=st.sampled_from([EVERYONE, (1, 2), (1, 3)]), end=st.integers(0, 2))
    def elect(self, isr: tuple[int, ...], end: int) -> None:
        self.end_offset = end
        self.ends = {broker: end if broker in isr else 0 for broker in OTHERS}
        self.truth = self.truth._replace(isr=isr)
        assert self.partition.assign(self.truth, end_offset=end, now_ms=0)

    @rule(broker=st.sampled_from((*OTHERS, None)))
    def append(self, broker: int | None) -> None:
        """And often one of the followers has it at once, but not the other."""
        self.end_offset += 1
        self.partition.appended(self.end_offset)
        if broker is not None:
            self.fetch(broker, 99)

    @rule(broker=st.sampled_from(OTHERS), more=st.sampled_from([99, 1, 0]))
    def fetch(self, broker: int, more: int) -> None:
        """A follower has a little more than last time, and says so."""
        self.ends[broker] = min(self.end_offset, self.ends[broker] + more)
        epoch = self.brokers[broker]
        error = self.partition.fetched_by(
            broker, epoch or 10, self.ends[broker], self.end_offset, self.now_ms
        )
        assert error in (ErrorCode.NONE, ErrorCode.STALE_BROKER_EPOCH)

    @rule(ms=st.sampled_from([LAG_MAX_MS + 1, 1]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def propose(self) -> None:
        before = self.partition.proposal_in_flight
        proposal = self.partition.proposal(self.now_ms)
        if proposal is not None:
            assert before is None, "one at a time"
            assert ME in [broker for broker, _ in proposal.isr]
            assert proposal.partition_epoch == self.partition.partition_epoch
            self.sent.append(proposal)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def handle(self, data: st.DataObject) -> None:
        """The controller, at last, and in any order."""
        proposal = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        if proposal.partition_epoch != self.truth.partition_epoch:
            self.answers.append((proposal, ErrorCode.INVALID_UPDATE_VERSION, None))
            return
        if any(self.brokers[broker] is None for broker, _ in proposal.isr):
            self.answers.append((proposal, ErrorCode.INELIGIBLE_REPLICA, None))
            return
        self.truth = self.truth._replace(
            isr=tuple([broker for broker, _ in proposal.isr]), partition_epoch=self.truth.partition_epoch + 1
        )
        self.answers.append((proposal, ErrorCode.NONE, self.truth))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), is_lost=st.booleans())
    def answer(self, data: st.DataObject, is_lost: bool) -> None:
        proposal, error, result = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if is_lost:
            self.partition.answered(proposal, None, None, self.now_ms)
        else:
            self.partition.answered(proposal, error, result, self.now_ms)

    @precondition(lambda self: self.partition.proposal_in_flight is not None)
    @rule(error=st.sampled_from([None, ErrorCode.NOT_CONTROLLER, ErrorCode.INVALID_UPDATE_VERSION]))
    def give_up(self, error: int | None) -> None:
        """No answer, or one that says nothing: the proposal may be handled yet."""
        proposal = self.partition.proposal_in_flight
        assert proposal is not None
        self.partition.answered(proposal, error, None, self.now_ms)

    @rule()
    def image(self) -> None:
        assert self.partition.assign(self.truth, end_offset=self.end_offset, now_ms=self.now_ms)

    @rule(broker=st.sampled_from(OTHERS))
    def fence_or_unfence(self, broker: int) -> None:
        """A broker is fenced and the controller takes it out of the ISR; or it is there again."""
        if self.brokers[broker] is None:
            self.brokers[broker] = 10
        elif broker in self.truth.isr:
            self.brokers[broker] = None
            isr = tuple([member for member in self.truth.isr if member != broker])
            self.truth = self.truth._replace(isr=isr, partition_epoch=self.truth.partition_epoch + 1)

    @invariant()
    def is_sound(self) -> None:
        self.partition.check()

    @invariant()
    def everyone_in_sync_has_what_is_committed(self) -> None:
        partition = self.partition
        assert partition.high_watermark >= self.high_watermark, "it went back"
        if partition.high_watermark > self.high_watermark:
            assert len(partition.isr) >= MIN_ISR
        self.high_watermark = partition.high_watermark
        assert self.high_watermark <= self.end_offset
        for broker in self.truth.isr:
            if broker != ME:
                assert self.ends[broker] >= self.high_watermark, f"{broker} has {self.ends[broker]}"
        assert all(broker in partition.maximal_isr for broker in partition.isr)


LeaderMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestLeader = LeaderMachine.TestCase
