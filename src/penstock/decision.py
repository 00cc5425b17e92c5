"""The shape in which a coordinator answers: what to remember, and what to say.

A coordinator (groups, the controller) never writes and never sends. It returns a Decision: changes
for its own log, in order, to be appended as one atomic batch, and the answers that may leave once those
changes are committed. Newcomers get one thing wrong: ``handle`` has already applied the changes to the
coordinator's state ("decide ahead"), so the shell appends them but must not apply them again; ``apply``
is for replaying a log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Change = TypeVar("Change")


@dataclass(slots=True)
class Decision(Generic[Change]):
    # Appended in order as one batch, or not at all.
    changes: list[Change] = field(default_factory=list)
    # For the request just handled; None when its answer comes later, in some decision's ``replies``.
    response: Any = None
    # Answers to earlier requests, by the token under which each was handed in.
    replies: list[tuple[Any, Any]] = field(default_factory=list)
