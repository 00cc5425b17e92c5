"""Topic names that auto-creation must not create for a while.

A client that polls (Metadata with auto-creation allowed, the default of most clients) would recreate a topic that
was just deleted, or create with defaults a topic whose creation with other settings was just refused. So:

- A refused name is not auto-created for ``HOLD_MS``.
- A deleted name is not auto-created for ``HOLD_MS``; for a client that was connected before the topic was
  deleted, not for ``OLD_CLIENTS_HOLD_MS``: that client is most likely still polling for the deleted topic.

CreateTopics creates any of these names at once. All of this is in the controller's memory; a new controller
starts with no names.
"""

from __future__ import annotations

# Longer than clients wait between two requests for a missing topic.
HOLD_MS = 10_000
# Twice the interval at which clients refresh the metadata of all their topics (metadata.max.age.ms).
OLD_CLIENTS_HOLD_MS = 600_000
# Beyond this, the oldest names are dropped.
NAMES_MAX = 10_000


class AutoCreation:
    def __init__(self) -> None:
        # Name -> when. Oldest first.
        self._refused: dict[str, int] = {}
        self._deleted: dict[str, int] = {}

    def refused(self, name: str, now_ms: int) -> None:
        _put(self._refused, name, now_ms)

    def deleted(self, name: str, now_ms: int) -> None:
        _put(self._deleted, name, now_ms)

    def created(self, name: str) -> None:
        self._refused.pop(name, None)
        self._deleted.pop(name, None)

    def is_held(self, name: str, connected_for_ms: int, now_ms: int) -> bool:
        """Whether a client that has been connected for this long must not auto-create the topic."""
        refused_ms = self._refused.get(name)
        if refused_ms is not None and now_ms - refused_ms < HOLD_MS:
            return True
        deleted_ms = self._deleted.get(name)
        if deleted_ms is None:
            return False
        ago_ms = now_ms - deleted_ms
        return ago_ms < (OLD_CLIENTS_HOLD_MS if connected_for_ms > ago_ms else HOLD_MS)

    def check(self) -> None:
        for names in (self._refused, self._deleted):
            assert len(names) <= NAMES_MAX
            times = list(names.values())
            assert times == sorted(times)


def _put(names: dict[str, int], name: str, now_ms: int) -> None:
    names.pop(name, None)
    names[name] = now_ms
    if len(names) > NAMES_MAX:
        del names[next(iter(names))]
