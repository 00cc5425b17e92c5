"""Clients that query offsets: by time, and those that a group committed.

A ``TimeQuerier`` queries offsets by the times of records that were read. An ``OffsetCommitter`` commits offsets
of a topic that is deleted and created again, without being a member of its group, and fetches them.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.topics import RECREATED, Topics, list_offset

# Clients commit by name. A coordinator that does not know of a new topic yet takes its name for the old topic.
# After this time it knows, or has lost its lease.
HEARD_OF_MS = 10_000
NO_GENERATION = -1


class TimeQuerier:
    def __init__(
        self, client: Client, checkers: ClientCheckers, topics: Topics, name: str, *, interval_ms: float
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._name = name
        self._interval_ms = interval_ms

    async def run(self) -> None:
        client, times = self._client, self._checkers.times
        while True:
            await client.pause(self._chance.expovariate(1 / self._interval_ms))
            known = self._checkers.values.times
            # Queries go by name, so a deleted topic could be mistaken for another.
            places = [
                place
                for place, found in known.items()
                if found and self._topics.existing.get(place.topic) == place.topic_id
            ]
            places = [place for place in places if place.topic_id not in self._topics.deleting]
            if not places:
                continue
            place = self._chance.choice(places)
            time_ms = self._chance.choice(list(known[place].values())) + self._chance.choice([-1, 0, 0, 1])
            expected = times.expected(place, time_ms)
            offset = await list_offset(client, place, time_ms)
            if offset is None:
                await client.refresh([place.topic])
            elif place.topic_id not in self._topics.deleting:
                times.found(place, time_ms, expected, offset, self._name)


class OffsetCommitter:
    """Commits for a group without members, and fetches the commits."""

    def __init__(
        self, client: Client, checkers: ClientCheckers, topics: Topics, group: str, *, interval_ms: float
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._group = group
        self._interval_ms = interval_ms
        self._coordinator: int | None = None
        # Every commit has a different offset, which identifies it.
        self._committed = 0

    async def run(self) -> None:
        client = self._client
        while True:
            await client.pause(self._chance.expovariate(1 / self._interval_ms))
            await client.refresh([RECREATED])
            places = client.places.get(RECREATED, [])
            if not places or not self._is_known(places[0]):
                continue
            if self._coordinator is None and not await self._find():
                continue
            if self._chance.random() < 0.5:
                await self._commit(self._chance.choice(places))
            else:
                await self._ask(self._chance.choice(places))

    def _is_known(self, place: Place) -> bool:
        """Whether all brokers know of the topic, and it is not being deleted."""
        since_ms = self._topics.since_ms.get(place.topic_id)
        return (
            since_ms is not None
            and self._client.process.loop.now_ms > since_ms + HEARD_OF_MS
            and place.topic_id not in self._topics.deleting
        )

    async def _find(self) -> bool:
        self._coordinator = await self._client.find_coordinator(self._group)
        return self._coordinator is not None

    async def _commit(self, place: Place) -> None:
        self._committed += 1
        offset, commits = self._committed, self._checkers.commits
        commits.committing(self._group, place, NO_GENERATION, offset)
        partition = OffsetCommitRequestPartition(
            partition_index=place.partition, committed_offset=offset, committed_metadata=""
        )
        response = await self._client.call(
            self._coordinator,
            OffsetCommitRequest(
                group_id=self._group,
                generation_id_or_member_epoch=NO_GENERATION,
                member_id="",
                topics=[OffsetCommitRequestTopic(name=place.topic, partitions=[partition])],
            ),
            7,
        )
        if response is None or response.topics[0].partitions[0].error_code:
            self._coordinator = None
            return
        is_deleting = place.topic_id in self._topics.deleting
        commits.acked(self._group, place, NO_GENERATION, offset, is_deleting=is_deleting)

    async def _ask(self, place: Place) -> None:
        wanted = OffsetFetchRequestTopics(name=place.topic, partition_indexes=[place.partition])
        response = await self._client.call(
            self._coordinator,
            OffsetFetchRequest(
                groups=[OffsetFetchRequestGroup(group_id=self._group, topics=[wanted])], require_stable=True
            ),
            8,
        )
        if response is None or response.groups[0].error_code:
            self._coordinator = None
            return
        found = response.groups[0].topics[0].partitions[0]
        if found.error_code == ErrorCode.NONE and place.topic_id not in self._topics.deleting:
            self._checkers.commits.fetched(self._group, place, found.committed_offset, self._group)
