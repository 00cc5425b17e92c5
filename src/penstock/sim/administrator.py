"""A client that creates, grows, deletes and configures topics during a run."""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.offsets import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.loop import Process
from penstock.sim.topics import INPUTS, MORTAL, RECREATED, Topics

# Resource types, and operations on a setting.
TOPIC = 2
BROKER = 4
SET = 0
DELETE = 1


class Administrator:
    """Changes topics and settings during a run."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        *,
        interval_ms: float,
        replication_factor: int,
        configs: dict[str, str],
        on_made: Callable[[list[Place]], None],
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._interval_ms = interval_ms
        self._replication_factor = replication_factor
        self._configs = configs
        # Called with new partitions.
        self._on_made = on_made
        self._made = 0
        self.is_open = True
        self.changes = 0

    @property
    def process(self) -> Process:
        return self._client.process

    async def create(self, name: str, partitions: int, configs: dict[str, str]) -> None:
        """Create a topic, with retries."""
        while True:
            request = CreateTopicsRequest(
                topics=[
                    CreatableTopic(
                        name=name,
                        num_partitions=partitions,
                        replication_factor=self._replication_factor,
                        configs=[
                            CreatableTopicConfig(name=key, value=value)
                            for key, value in {**self._configs, **configs}.items()
                        ],
                    )
                ],
                timeout_ms=5_000,
            )
            response = await self._client.call(None, request, 7, timeout_ms=8_000)
            if response is not None and response.topics[0].error_code in (
                ErrorCode.NONE,
                ErrorCode.TOPIC_ALREADY_EXISTS,
            ):
                break
            await self._client.refresh([])
            await self._client.back_off()
        self.changes += 1
        await self._announce(name, 0)

    async def _announce(self, name: str, before: int) -> None:
        """Wait until a broker knows the new partitions, then announce them."""
        while True:
            await self._client.refresh([name])
            places = self._client.places.get(name, [])
            # A broker that lags may still return the deleted topic with this name.
            if len(places) > before and places[0].topic_id not in self._topics.deleting:
                self._topics.known(name)[name] = places[0].topic_id
                self._topics.since_ms[places[0].topic_id] = self.process.loop.now_ms
                self._on_made(places[before:])
                return
            await self._client.back_off()

    async def run(self) -> None:
        while True:
            await self._client.pause(self._chance.expovariate(1 / self._interval_ms))
            if not self.is_open:
                continue
            what = self._chance.choice(
                [
                    self._make,
                    self._grow,
                    self._delete,
                    self._configure,
                    self._delete_records,
                    self._reassign,
                    self._elect,
                ]
            )
            await what()

    def _alive(self) -> list[str]:
        """The topics that this administrator may change."""
        return [name for name in self._topics.alive() if name != RECREATED]

    def _any(self) -> str | None:
        alive = self._alive()
        return self._chance.choice(alive) if alive else None

    async def _make(self) -> None:
        if len(self._topics.alive()) >= 5:
            return
        dead = [
            name for name in self._topics.existing if name not in self._topics.alive() and name != RECREATED
        ]
        if dead and self._chance.random() < 0.7:
            name = self._chance.choice(dead)
        else:
            self._made += 1
            name = f"{MORTAL}-{self._made}"
        await self.create(name, self._chance.randint(1, 3), {})

    async def _grow(self) -> None:
        name = self._any()
        places = self._client.places.get(name or "", [])
        if name is None or not places or len(places) >= 4:
            return
        before = len(places)
        request = CreatePartitionsRequest(
            topics=[CreatePartitionsTopic(name=name, count=before + 1, assignments=None)], timeout_ms=5_000
        )
        response = await self._client.call(None, request, 3, timeout_ms=8_000)
        if response is not None and not response.results[0].error_code:
            self.changes += 1
            await self._announce(name, before)

    async def _delete(self) -> None:
        mortal = [name for name in self._alive() if MORTAL in name]
        if not mortal:
            return
        await self.delete(self._topics.existing[self._chance.choice(mortal)])

    async def delete(self, topic_id: bytes) -> None:
        """Delete a topic, with retries."""
        # From now on nothing is guaranteed for it.
        self._topics.deleting[topic_id] = None
        while True:
            # By id: a late retry must not delete a new topic with the same name.
            request = DeleteTopicsRequest(topics=[DeleteTopicState(topic_id=topic_id)], timeout_ms=5_000)
            response = await self._client.call(None, request, 6, timeout_ms=8_000)
            if response is not None and response.responses[0].error_code in (
                ErrorCode.NONE,
                ErrorCode.UNKNOWN_TOPIC_ID,
            ):
                self.changes += 1
                return
            await self._client.back_off()
            await self._client.refresh([])

    async def _reassign(self) -> None:
        """Move a partition to other brokers, or to the same ones in another order."""
        alive = [*self._alive(), *self._topics.transactional, *self._topics.alive_compacted()]
        name = self._chance.choice(alive) if alive else None
        places = self._client.places.get(name or "", [])
        brokers = sorted(self._client.brokers)
        if not places or len(brokers) < max(2, self._replication_factor):
            return
        place = self._chance.choice(places)
        replicas = self._chance.sample(brokers, self._replication_factor)
        request = AlterPartitionReassignmentsRequest(
            timeout_ms=5_000,
            topics=[
                ReassignableTopic(
                    name=place.topic,
                    partitions=[ReassignablePartition(partition_index=place.partition, replicas=replicas)],
                )
            ],
        )
        response = await self._client.call(None, request, 0, timeout_ms=8_000)
        if response is not None and not response.error_code:
            self.changes += 1

    async def _elect(self) -> None:
        """Elect the preferred leaders."""
        if len(self._client.brokers) < 2:
            return
        request = ElectLeadersRequest(election_type=0, topic_partitions=None, timeout_ms=5_000)
        response = await self._client.call(None, request, 2, timeout_ms=8_000)
        if response is not None and not response.error_code:
            self.changes += 1

    async def _configure(self) -> None:
        name = self._any()
        if name is None:
            return
        setting, values = self._chance.choice(
            [
                ("segment.bytes", ["2048", "8192"]),
                ("max.message.bytes", ["100000", "200000"]),
                ("flush.ms", ["1000", "60000"]),
            ]
        )
        if await set_config(self._client, TOPIC, name, setting, self._chance.choice(values)):
            self.changes += 1

    async def _delete_records(self) -> None:
        name = self._any()
        places = self._client.places.get(name or "", [])
        # DeleteRecords goes by name: a late request must not reach another topic. Every input has an output.
        if not places or MORTAL in places[0].topic or name == INPUTS:
            return
        place = self._chance.choice(places)
        end = self._checkers.values.end(place)
        leadership = self._client.leader(place)
        if leadership is None or end == 0 or self._chance.random() < 0.5:
            return
        offset = self._chance.randint(0, end)
        self._checkers.starts.asked(place, offset)
        request = DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(
                    name=place.topic,
                    partitions=[DeleteRecordsPartition(partition_index=place.partition, offset=offset)],
                )
            ],
            timeout_ms=5_000,
        )
        response = await self._client.call(leadership.broker, request, 2, timeout_ms=8_000)
        if response is not None and not response.topics[0].partitions[0].error_code:
            self.changes += 1
            low_watermark = response.topics[0].partitions[0].low_watermark
            self._checkers.starts.deleted(place, low_watermark, leadership.epoch)


async def set_config(
    client: Client, resource_type: int, resource_name: str, setting: str, value: str | None
) -> bool:
    """Change one setting, or with None reset it to its default; whether that was acknowledged."""
    change = IncrementalAlterableConfig(
        name=setting, config_operation=SET if value is not None else DELETE, value=value
    )
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsResource(
                resource_type=resource_type, resource_name=resource_name, configs=[change]
            )
        ]
    )
    response = await client.call(None, request, 1, timeout_ms=8_000)
    return response is not None and not response.responses[0].error_code
