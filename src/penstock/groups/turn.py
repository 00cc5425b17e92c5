"""The state of one call to a group coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.decision import Decision
from penstock.groups.changes import Change
from penstock.protocol.schema import Message


class Waiting(NamedTuple):
    """A request whose response comes later, and its version."""

    token: Any
    version: int


@dataclass(slots=True)
class Turn:
    """The two clocks of the call, and the decision it builds."""

    now_ms: int
    wall_ms: int
    decision: Decision[Change] = field(default_factory=Decision)

    def answer(self, waiting: Waiting | None, response: Message) -> None:
        if waiting is not None:
            self.decision.replies.append((waiting.token, response))
