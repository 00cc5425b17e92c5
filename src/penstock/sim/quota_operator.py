"""A client that changes quotas while others write and read: they are delayed, and nothing is lost.

The quotas are small, so that ordinary clients of a run are over them. At the end all are removed, and everything
that waited must be acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.metadata.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)
from penstock.metadata.security import QuotaEntity
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.quotas import AlterClientQuotasRequest, QuotaAlteration, QuotaOp
from penstock.sim.client import CLIENT_ID, Client

ALTER_VERSION = 1
NAME = CLIENT_ID.decode()

ENTITIES: tuple[QuotaEntity, ...] = (
    (("user", "ANONYMOUS"),),
    (("user", None),),
    (("client-id", NAME),),
    (("client-id", None),),
    (("client-id", NAME), ("user", "ANONYMOUS")),
    (("client-id", None), ("user", None)),
)
ADDRESSES: QuotaEntity = (("ip", None),)
# Bytes, partitions and connections per second. A batch has about a hundred bytes.
VALUES = {
    PRODUCER_BYTE_RATE: (100.0, 500.0, 5_000.0),
    CONSUMER_BYTE_RATE: (200.0, 1_000.0, 20_000.0),
    CONTROLLER_MUTATION_RATE: (0.5, 5.0),
    REQUEST_PERCENTAGE: (1.0,),
    CONNECTION_CREATION_RATE: (1.0, 10.0),
}


class QuotaOperator:
    def __init__(
        self,
        client: Client,
        interval_ms: float,
        known: Callable[[], Iterable[tuple[QuotaEntity, str]]],
    ) -> None:
        """``known``: the quotas that any broker knows of."""
        self._client = client
        self._known = known
        self._chance = client.chance
        self._interval_ms = interval_ms
        # What may be set: also if the answer was lost.
        self._set: dict[tuple[QuotaEntity, str], None] = {}
        self.is_open = True
        self.changes = 0

    @property
    def is_done(self) -> bool:
        """Whether every quota was removed."""
        return not self.is_open and not self._set and not list(self._known())

    async def run(self) -> None:
        chance = self._chance
        while True:
            await self._client.pause(chance.expovariate(1 / self._interval_ms) if self.is_open else 100)
            if not self._client.brokers:
                await self._client.refresh([])
            if not self.is_open:
                # A request without an answer may set a quota long after it was sent.
                for entity, key in dict.fromkeys([*self._set, *self._known()]):
                    await self._alter(entity, key, None)
                continue
            key = chance.choice(list(VALUES))
            entity = ADDRESSES if key == CONNECTION_CREATION_RATE else chance.choice(ENTITIES)
            await self._alter(entity, key, None if chance.random() < 0.4 else chance.choice(VALUES[key]))

    async def _alter(self, entity: QuotaEntity, key: str, value: float | None) -> None:
        if value is not None:
            self._set[entity, key] = None
        parts = [QuotaEntityPart(entity_type=type, entity_name=name) for type, name in entity]
        op = QuotaOp(key=key, value=value or 0.0, remove=value is None)
        request = AlterClientQuotasRequest(entries=[QuotaAlteration(entity=parts, ops=[op])])
        response = await self._client.call(None, request, ALTER_VERSION)
        if response is None or response.entries[0].error_code:
            return
        self.changes += 1
        if value is None:
            self._set.pop((entity, key), None)
