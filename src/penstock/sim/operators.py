"""Clients that change settings, and that delete and create topics again.

An ``Operator`` changes settings while clients write: nothing that was acknowledged under one value may be lost
under another. A ``Recreator`` deletes a topic and creates another with the same name, again and again.
"""

from __future__ import annotations

from penstock.sim.administrator import BROKER, TOPIC, Administrator, set_config
from penstock.sim.client import Client
from penstock.sim.topics import Topics

HOUR_MS = 3_600_000
# Values that settings are changed to; None resets to the default. No value lets anything expire in a run.
VALUES: dict[str, tuple[str | None, ...]] = {
    "min.insync.replicas": ("1", "2", "3"),
    "retention.ms": (str(HOUR_MS), str(24 * HOUR_MS), "-1", None),
    "retention.bytes": (str(1 << 30), "-1", None),
    "flush.messages": ("1", None),
    "flush.ms": ("100", "5000", None),
    "unclean.leader.election.enable": ("false", None),
}
# Also set for all brokers, which affects topics without their own value, such as the offsets topic.
BROKER_WIDE = ("min.insync.replicas",)


class Operator:
    """Changes the settings of topics, one at a time."""

    def __init__(
        self,
        client: Client,
        topics: Topics,
        settings: tuple[str, ...],
        *,
        in_sync_min: int,
        copies: int,
        interval_ms: float,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._topics = topics
        self._settings = settings
        # Limits of min.insync.replicas: more than there are copies could never be reached.
        self._in_sync_min = in_sync_min
        self._copies = copies
        self._interval_ms = interval_ms
        self.is_open = True
        self.changes = 0

    async def run(self) -> None:
        while True:
            await self._client.pause(self._chance.expovariate(1 / self._interval_ms))
            alive = self._topics.alive()
            if not self.is_open or not alive:
                continue
            setting = self._chance.choice(self._settings)
            value = self._chance.choice(VALUES[setting])
            if setting == "min.insync.replicas" and value is not None:
                value = str(min(max(int(value), self._in_sync_min), self._copies))
            resource, name = TOPIC, self._chance.choice(alive)
            if setting in BROKER_WIDE and self._chance.random() < 0.2:
                resource, name = BROKER, ""
            if not self._client.brokers:
                await self._client.refresh([])
            if await set_config(self._client, resource, name, setting, value):
                self.changes += 1


class Recreator:
    """Deletes one topic and creates it again."""

    def __init__(
        self,
        administrator: Administrator,
        topics: Topics,
        client: Client,
        name: str,
        configs: dict[str, str] | None = None,
    ) -> None:
        self._configs = configs or {}
        self._administrator = administrator
        self._name = name
        self._topics = topics
        self._client = client
        self.is_open = True
        self.recreations = 0

    async def run(self) -> None:
        chance = self._client.chance
        await self._administrator.create(self._name, chance.randint(1, 2), self._configs)
        while self.is_open:
            # Sometimes long enough for all brokers to know of it.
            await self._client.pause(chance.uniform(2_000, 25_000))
            if self.is_open:
                await self._administrator.delete(self._topics.known(self._name)[self._name])
                await self._client.pause(chance.choice([0, 0, 500, 5_000]))
                await self._administrator.create(self._name, chance.randint(1, 2), self._configs)
                self.recreations += 1
