"""The result of a coordinator's ``handle``: changes for its log, and responses.

A coordinator (groups, the controller) does no I/O. It returns a Decision: changes for its own log, in order, to be
appended as one atomic batch, and the responses to send once those changes are committed.

Careful: ``handle`` has already applied the changes to the coordinator's state ("decide ahead"), so the shell
appends them but must not apply them again; ``apply`` is for replaying a log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Change = TypeVar("Change")


@dataclass(slots=True)
class Decision(Generic[Change]):
    # Appended in order as one batch, or not at all.
    changes: list[Change] = field(default_factory=list)
    # For the current request; None when its response comes later, in the ``replies`` of another decision.
    response: Any = None
    # (token, response) for earlier requests.
    replies: list[tuple[Any, Any]] = field(default_factory=list)
    # Producer id and epoch: the changes are part of this producer's open transaction, and take effect when it
    # commits. They are appended as a transactional batch of the producer.
    producer: tuple[int, int] | None = None
