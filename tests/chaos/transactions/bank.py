"""What was promised to the clients of transactions, and what readers of committed records find.

``Bank`` guards the transfers, ``Chain`` the outputs made from them. Both hear the clients (what was committed,
what was aborted, for certain) and the readers (each record in the order of its partition):

    aborted read    no reader finds a record of a transfer that was aborted, or meant to be
    torn            of a transfer all records are found or none; at once where a later one of that client shows it
    lost            all records of a transfer whose commit was acknowledged
    doubled         no record twice
    zombie          in each partition a client's records come in the order of its instances and their numbers: when
                    a new instance has its id, nothing of an older one takes effect
    changed         one record per place and offset, whoever reads and when
    sum             the balances of all accounts add up to nothing
    exactly once    each transfer's record has one output, and nothing else has any
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Self

from tests.chaos.ledger import Ledger, Place


class Identity(NamedTuple):
    """A transaction: whose, of which of its lives, which one. They follow each other in this order."""

    client: int
    instance: int
    number: int


@dataclass(frozen=True, slots=True)
class Transfer:
    client: int
    instance: int
    number: int
    # Whether it is to be committed: if not, nobody may ever see it.
    is_meant: bool
    # What each account gains or loses; there is one record for each.
    amounts: dict[int, int]

    @property
    def identity(self) -> Identity:
        return Identity(self.client, self.instance, self.number)

    def encode(self) -> bytes:
        amounts = ",".join(f"{account}:{amount}" for account, amount in self.amounts.items())
        meant = "commit" if self.is_meant else "abort"
        return f"{self.client} {self.instance} {self.number} {meant} {amounts}".encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        client, instance, number, meant, amounts = value.decode().split()
        pairs = (pair.split(":") for pair in amounts.split(","))
        return cls(
            int(client),
            int(instance),
            int(number),
            meant == "commit",
            {int(account): int(amount) for account, amount in pairs},
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What a worker makes of one record."""

    client: int
    instance: int
    number: int
    # Where the record was that it was made from.
    partition: int
    offset: int
    # And of which transfer.
    source: Identity

    @property
    def identity(self) -> Identity:
        return Identity(self.client, self.instance, self.number)

    def encode(self) -> bytes:
        source = ".".join(map(str, self.source))
        return f"{self.client} {self.instance} {self.number} {self.partition} {self.offset} {source}".encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        client, instance, number, partition, offset, source = value.decode().split()
        of = Identity(*map(int, source.split(".")))
        return cls(int(client), int(instance), int(number), int(partition), int(offset), of)


class Outcomes:
    """What the programs said about the ends of their transactions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self.committed: set[Identity] = set()
        self.aborted: set[Identity] = set()
        self.unknown = 0

    def said(self, identity: Identity, word: str) -> None:
        with self._lock:
            if word == "committed":
                self.committed.add(identity)
            elif word == "aborted":
                self.aborted.add(identity)
            elif word == "unknown":
                self.unknown += 1
            else:
                self._ledger.violated(f"client {identity.client} said {word}")


class Transfers:
    """The transfers that one reader has found. Each reading begins with a new one, at the beginning of the log."""

    def __init__(self, who: str, ledger: Ledger, outcomes: Outcomes) -> None:
        self._who = who
        self._ledger = ledger
        self._outcomes = outcomes
        self._newest: dict[tuple[int, int], Identity] = {}
        # Those of which some accounts are missing, per client: which, and what each is to gain.
        self._unsettled: defaultdict[int, dict[Identity, dict[int, int]]] = defaultdict(dict)
        self.balances: defaultdict[int, int] = defaultdict(int)
        self.found: set[Identity] = set()
        self.records: dict[tuple[int, int], bytes] = {}

    def seen(self, partition: int, offset: int, value: bytes) -> None:
        transfer = Transfer.decode(value)
        identity = transfer.identity
        self.records[partition, offset] = value
        if not transfer.is_meant or identity in self._outcomes.aborted:
            self._violated(f"{identity} at {partition}:{offset} was aborted, and is read")
        newest = self._newest.get((partition, identity.client))
        if newest is not None and identity <= newest:
            self._violated(f"{identity} at {partition}:{offset} comes after {newest}: doubled, or a zombie's")
        self._newest[partition, identity.client] = identity
        self.balances[partition] += transfer.amounts[partition]
        unsettled = self._unsettled[identity.client]
        for other, missing in unsettled.items():
            if partition in missing and other < identity:
                self._violated(f"{other} has no record in {partition}, where {identity} is: torn")
        if identity not in self.found:
            self.found.add(identity)
            unsettled[identity] = dict(transfer.amounts)
        if identity in unsettled:
            unsettled[identity].pop(partition, None)
            if not unsettled[identity]:
                del unsettled[identity]

    @property
    def unsettled(self) -> set[Identity]:
        return {identity for each in self._unsettled.values() for identity in each}

    def check_sum(self) -> None:
        """Balances, and what is still to be found of transfers of which a part is found, add up to nothing."""
        due = sum(sum(missing.values()) for each in self._unsettled.values() for missing in each.values())
        total = sum(self.balances.values()) + due
        if total:
            self._violated(f"the balances add up to {total}: {dict(self.balances)}")

    def check_complete(self) -> None:
        """Of a reader that has read everything, when nobody writes any more."""
        for identity in sorted(self.unsettled):
            self._violated(f"{identity} is not whole: torn")
        lost = self._outcomes.committed - self.found
        if lost:
            self._violated(f"{len(lost)} transfers were committed and are not found: {sorted(lost)[:5]}")
        # Heard of before or after they were read.
        aborted = self._outcomes.aborted & self.found
        if aborted:
            self._violated(f"{len(aborted)} transfers were aborted and are found: {sorted(aborted)[:5]}")
        self.check_sum()

    def _violated(self, what: str) -> None:
        self._ledger.violated(f"{self._who}: {what}")


class Chain:
    """The outputs that one reader has found."""

    def __init__(self, who: str, ledger: Ledger, outcomes: Outcomes) -> None:
        self._who = who
        self._ledger = ledger
        self._outcomes = outcomes
        self._newest: dict[tuple[int, int], Identity] = {}
        # The output made from each record.
        self.made: dict[tuple[int, int], Output] = {}
        self.found: set[Identity] = set()
        self.records: dict[tuple[int, int], bytes] = {}

    def seen(self, partition: int, offset: int, value: bytes) -> None:
        output = Output.decode(value)
        self.records[partition, offset] = value
        if output.identity in self._outcomes.aborted:
            self._violated(f"{output} was aborted, and is read")
        newest = self._newest.get((partition, output.client))
        if newest is not None and output.identity < newest:
            self._violated(f"{output} at {partition}:{offset} comes after {newest}: a zombie's")
        self._newest[partition, output.client] = output.identity
        before = self.made.setdefault((output.partition, output.offset), output)
        if before is not output:
            self._violated(f"{output} was made already: {before}")
        self.found.add(output.identity)

    def check_complete(self, sources: Transfers) -> None:
        """Of a reader that has read everything, when every record has been taken up."""
        missing = sources.records.keys() - self.made.keys()
        if missing:
            self._violated(f"{len(missing)} records have no output: {sorted(missing)[:5]}")
        invented = self.made.keys() - sources.records.keys()
        if invented:
            shown = [self.made[place] for place in sorted(invented)[:5]]
            self._violated(f"{len(invented)} outputs were made from records that are not there: {shown}")
        for place in self.made.keys() & sources.records.keys():
            if Transfer.decode(sources.records[place]).identity != self.made[place].source:
                self._violated(
                    f"{self.made[place]} was made from another record than {sources.records[place]!r}"
                )
        aborted = self._outcomes.aborted & self.found
        if aborted:
            self._violated(f"{len(aborted)} transactions were aborted and are found: {sorted(aborted)[:5]}")
        lost = self._outcomes.committed - self.found
        if lost:
            self._violated(f"{len(lost)} transactions were committed and are not found: {sorted(lost)[:5]}")

    def _violated(self, what: str) -> None:
        self._ledger.violated(f"{self._who}: {what}")


def differences(one: dict[tuple[int, int], bytes], other: dict[tuple[int, int], bytes]) -> list[str]:
    """Where two readings of the same topic do not agree."""
    return [
        f"{partition}:{offset} is {one.get((partition, offset))!r} and {other.get((partition, offset))!r}"
        for partition, offset in sorted(one.keys() | other.keys())
        if one.get((partition, offset)) != other.get((partition, offset))
    ]


def places(topic: str, partitions: int) -> list[Place]:
    return [Place(topic, partition) for partition in range(partitions)]
