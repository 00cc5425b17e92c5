"""The checkers of transactions under faults against made-up histories: each finds the one lie it is there for."""

from __future__ import annotations

import re

import pytest

from tests.chaos.ledger import Ledger
from tests.chaos.transactions.bank import Chain, Identity, Outcomes, Output, Transfer, Transfers


def transfer(
    number: int, *, client: int = 0, instance: int = 1, is_meant: bool = True, **amounts: int
) -> Transfer:
    accounts = {int(name.removeprefix("p")): amount for name, amount in amounts.items()}
    return Transfer(client, instance, number, is_meant, accounts)


class Story:
    """A reader, and what it is given."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.said = Outcomes(self.ledger)
        self.transfers = Transfers("reader", self.ledger, self.said)
        self.outputs_said = Outcomes(self.ledger)
        self.chain = Chain("reader", self.ledger, self.outputs_said)
        self._offsets = [0, 0, 0]

    def read(self, partition: int, *transfers: Transfer) -> None:
        for each in transfers:
            self.transfers.seen(partition, self._offsets[partition], each.encode())
            self._offsets[partition] += 1

    def made(self, offset: int, *, of: int, number: int = 0, instance: int = 1, at: int = 0) -> None:
        source = (
            Transfer.decode(self.transfers.records[0, of]).identity
            if (0, of) in self.transfers.records
            else None
        )
        output = Output(9, instance, number, 0, of, source or Identity(0, 0, 0))
        self.chain.seen(at, offset, output.encode())

    def found(self, complaint: str) -> None:
        assert self.ledger.violations, "nothing was noticed"
        assert re.search(complaint, self.ledger.violations[0]), self.ledger.violations


@pytest.fixture
def story() -> Story:
    return Story()


def test_values_say_who_they_are() -> None:
    one = transfer(3, p0=-5, p2=5)
    assert Transfer.decode(one.encode()) == one
    output = Output(1, 2, 3, 4, 5, Identity(6, 7, 8))
    assert Output.decode(output.encode()) == output


def test_whole_transfers_in_any_order_are_as_promised(story: Story) -> None:
    first, second, other = (
        transfer(0, p0=-5, p1=5),
        transfer(1, p1=-7, p0=7),
        transfer(0, client=1, p0=1, p1=-1),
    )
    for each in (first, second, other):
        story.said.said(each.identity, "committed")
    story.said.said(Identity(0, 1, 2), "aborted")
    story.read(0, first, other, second)
    assert story.transfers.unsettled == {first.identity, other.identity, second.identity}
    story.transfers.check_sum()
    story.read(1, other, first, second)
    story.transfers.check_complete()
    assert not story.ledger.violations


def test_a_transfer_without_an_answer_may_be_there_or_not(story: Story) -> None:
    for one, _ in ((transfer(0, p0=-5, p1=5), "there"), (transfer(1, p0=-5, p1=5), "not")):
        story.said.said(one.identity, "unknown")
    story.read(0, transfer(0, p0=-5, p1=5))
    story.read(1, transfer(0, p0=-5, p1=5))
    story.transfers.check_complete()
    assert not story.ledger.violations


def test_a_transfer_that_was_meant_to_be_aborted_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, is_meant=False, p0=-5, p1=5))
    story.found("aborted, and is read")


@pytest.mark.parametrize("is_heard_first", [True, False])
def test_a_transfer_that_was_aborted_is_noticed(story: Story, is_heard_first: bool) -> None:
    one = transfer(0, p0=-5, p1=5)
    if is_heard_first:
        story.said.said(one.identity, "aborted")
    story.read(0, one)
    story.read(1, one)
    story.said.said(one.identity, "aborted")
    story.transfers.check_complete()
    story.found("aborted")


def test_a_transfer_that_was_committed_and_is_nowhere_is_noticed(story: Story) -> None:
    story.said.said(Identity(0, 1, 0), "committed")
    story.transfers.check_complete()
    story.found("committed and are not found")


def test_a_torn_transfer_is_noticed_at_once_when_a_later_one_shows_it(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5))
    story.read(1, transfer(1, p1=-5, p2=5))
    story.found("torn")


def test_a_torn_transfer_is_noticed_in_the_end(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5))
    story.transfers.check_complete()
    story.found("torn")


def test_a_record_that_is_there_twice_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5), transfer(0, p0=-5, p1=5))
    story.found("doubled")


def test_a_zombie_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, instance=2, p0=-5, p1=5), transfer(7, instance=1, p0=-5, p1=5))
    story.found("zombie")


def test_money_from_nowhere_is_noticed(story: Story) -> None:
    one = transfer(0, p0=-5, p1=6)
    story.read(0, one)
    story.read(1, one)
    story.transfers.check_sum()
    story.found("add up to 1")


def test_one_output_for_each_record_is_as_promised(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5), transfer(1, p0=-5, p1=5))
    story.outputs_said.said(Identity(9, 1, 0), "committed")
    story.made(0, of=0)
    story.made(1, of=1)
    story.chain.check_complete(story.transfers)
    assert not story.ledger.violations


def test_a_second_output_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5))
    story.made(0, of=0)
    story.made(0, of=0, number=1, at=1)
    story.found("made already")


def test_a_missing_output_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5))
    story.chain.check_complete(story.transfers)
    story.found("have no output")


def test_an_output_of_an_aborted_record_is_noticed(story: Story) -> None:
    story.made(0, of=0)
    story.chain.check_complete(story.transfers)
    story.found("not there")


def test_an_output_of_an_aborted_transaction_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5))
    story.outputs_said.said(Identity(9, 1, 0), "aborted")
    story.made(0, of=0)
    story.found("aborted, and is read")


def test_an_output_of_a_zombie_is_noticed(story: Story) -> None:
    story.read(0, transfer(0, p0=-5, p1=5), transfer(1, p0=-5, p1=5))
    story.made(0, of=0, instance=2)
    story.made(1, of=1, instance=1)
    story.found("zombie")
