"""Members of a group that speak the group protocol themselves, because clients hide the generation.

What they guard: in one generation a partition has one owner, and what a member is told of a generation does
not change. A generation may be announced twice (a coordinator died after the join and before anything was
stored), but only one of the two is ever handed out as an assignment.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from tests.chaos.clients import Client
from tests.chaos.ledger import Ledger
from tests.cluster.wire import Address, NoAnswer, Wire

PROTOCOL_TYPE = "owners"
PARTITIONS = 12
SESSION_MS = 6000
REBALANCE_MS = 10_000
# A join waits for the other members, at most this long.
JOIN_TIMEOUT_S = REBALANCE_MS / 1000 + 5
# Errors after which a member goes on as it is, once the coordinator is found again.
_COORDINATOR_AWAY = {
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
}


class Owners:
    """Who was told to own what, in each generation."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        # (generation, partition) -> member
        self._owner: dict[tuple[int, int], str] = {}
        self._told: dict[tuple[int, str], list[int]] = {}
        self.newest = -1

    def assigned(self, generation: int, member: str, partitions: list[int]) -> None:
        with self._lock:
            before = self._told.setdefault((generation, member), partitions)
            if before != partitions:
                self._ledger.violated(
                    f"generation {generation}: {member} was given {before}, then {partitions}"
                )
            for partition in partitions:
                owner = self._owner.setdefault((generation, partition), member)
                if owner != member:
                    self._ledger.violated(
                        f"generation {generation}: {partition} belongs to {owner} and to {member}"
                    )
            if generation < self.newest - 1:
                self._ledger.violated(f"generation {generation} was handed out after {self.newest}")
            self.newest = max(self.newest, generation)

    @property
    def generations(self) -> int:
        with self._lock:
            return len({generation for generation, _ in self._told})


class Owner(Client):
    """Joins, shares the partitions out if it leads, holds its share by heartbeats, and joins again."""

    def __init__(
        self, number: int, brokers: Sequence[Address], ledger: Ledger, owners: Owners, group: str
    ) -> None:
        super().__init__(f"owner {number}", ledger)
        self._brokers = list(brokers)
        self._turn = number
        self._owners = owners
        self._group = group
        self._wire: Wire | None = None
        self._member_id = ""
        self._generation = -1
        self._is_to_forget = False

    def step(self) -> None:
        if self._is_to_forget:
            self._is_to_forget, self._generation, self._member_id = False, -1, ""
        try:
            if self._wire is None:
                self._wire = self._coordinator()
            elif self._generation < 0:
                self._join(self._wire)
            else:
                self._beat(self._wire)
                self.pause(0.5)
        except NoAnswer:
            self._disconnect()

    def finish(self) -> None:
        self._disconnect()

    def leave_abruptly(self) -> None:
        """Forget who we are, as a member that crashed and came back would."""
        self._is_to_forget = True

    def _coordinator(self) -> Wire | None:
        self._turn += 1
        address = self._brokers[self._turn % len(self._brokers)]
        with Wire(address, timeout_s=2) as wire:
            answer = wire.call(FindCoordinatorRequest(key_type=0, coordinator_keys=[self._group]), 4)
        (found,) = answer.coordinators
        if found.error_code:
            self.pause(0.2)
            return None
        return Wire((found.host, found.port), timeout_s=JOIN_TIMEOUT_S)

    def _join(self, wire: Wire) -> None:
        answer = wire.call(
            JoinGroupRequest(
                group_id=self._group,
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=REBALANCE_MS,
                member_id=self._member_id,
                protocol_type=PROTOCOL_TYPE,
                protocols=[JoinGroupRequestProtocol(name="shares", metadata=b"")],
            ),
            7,
        )
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = answer.member_id
        elif self._is_refused(answer.error_code):
            pass
        else:
            self._member_id = answer.member_id
            self._sync(wire, answer)

    def _sync(self, wire: Wire, joined: Any) -> None:
        members = sorted(member.member_id for member in joined.members)
        shares = {
            member: list(range(number, PARTITIONS, len(members))) for number, member in enumerate(members)
        }
        answer = wire.call(
            SyncGroupRequest(
                group_id=self._group,
                generation_id=joined.generation_id,
                member_id=self._member_id,
                protocol_type=PROTOCOL_TYPE,
                protocol_name="shares",
                assignments=[
                    SyncGroupRequestAssignment(member_id=member, assignment=json.dumps(share).encode())
                    for member, share in shares.items()
                ],
            ),
            5,
        )
        if not self._is_refused(answer.error_code):
            self._generation = joined.generation_id
            self._owners.assigned(
                joined.generation_id, self._member_id, json.loads(bytes(answer.assignment) or b"[]")
            )

    def _beat(self, wire: Wire) -> None:
        answer = wire.call(
            HeartbeatRequest(group_id=self._group, generation_id=self._generation, member_id=self._member_id),
            4,
        )
        self._is_refused(answer.error_code)

    def _is_refused(self, code: int) -> bool:
        """Act on an error that a group may answer; any other is a broken promise."""
        if code == ErrorCode.NONE:
            return False
        if code in _COORDINATOR_AWAY:
            self._disconnect()
            time.sleep(0.1)
        elif code in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION):
            self._generation = -1
        elif code == ErrorCode.UNKNOWN_MEMBER_ID:
            self._generation, self._member_id = -1, ""
        else:
            raise AssertionError(f"the coordinator answered {code}")
        return True

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.__exit__()
        self._wire = None
        self.pause(0.05)
