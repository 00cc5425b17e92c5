"""Names that are not created just because a client asks for a topic of that name.

A client that polls (Metadata with auto-creation allowed, which is most clients' default) would make again what was
just deleted, and would make with the defaults what somebody was just refused with other ones. So:

- a name whose creation was refused is not created by asking for it for ``HOLD_MS``;
- a deleted name is not for ``HOLD_MS``, and not for ``OLD_CLIENTS_HOLD_MS`` by a client that was connected before
  the topic was deleted: such a client is most likely still polling for the one that is gone.

CreateTopics creates any of them at once. All of this is in the controller's memory; a new controller begins anew.
"""

from __future__ import annotations

# Longer than clients wait between two requests for a topic that they miss.
HOLD_MS = 10_000
# Twice the interval at which clients ask again for every topic that they know (metadata.max.age.ms).
OLD_CLIENTS_HOLD_MS = 600_000
# The oldest are forgotten.
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
        """Whether a client that has been connected for so long must not create the topic by asking for it."""
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
