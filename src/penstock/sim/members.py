"""Members of classic consumer groups: join, sync, read, commit, leave or die, and resume from the committed
offset.

A member checks the promises of the group: no other member owns its partitions in this generation, and it resumes
exactly where the group last committed. It commits only offsets up to the end of what can be read.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    TopicPartition,
)
from penstock.protocol.messages.groups import (
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    LeaveGroupRequest,
    MemberIdentity,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from penstock.protocol.schema import decode, encode
from penstock.sim.client import Client, Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.topics import EARLIEST, LATEST, Topics, list_offset

SESSION_MS = 6_000
REBALANCE_MS = 8_000
PROTOCOL_VERSION = 0
# The coordinator does not know this member, or knows a newer incarnation of it.
GONE = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID)


class Member:
    """One member of a group, which joins and leaves again and again."""

    def __init__(
        self,
        client: Client,
        checkers: ClientCheckers,
        topics: Topics,
        group: str,
        name: str,
        *,
        subscription: list[str],
        # The instance id of a static member (KIP-345).
        instance: str | None = None,
    ) -> None:
        self._client = client
        self._chance = client.chance
        self._checkers = checkers
        self._topics = topics
        self._group = group
        self._name = name
        self._subscription = subscription
        self._instance = instance
        self._coordinator: int | None = None
        self._member_id = ""
        self._generation = -1
        # The assignment of the last sync.
        self._owned: list[Place] = []
        self.is_open = True
        self.generations = 0
        # Successful heartbeats: the member was in a generation with an assignment.
        self.heartbeats = 0
        self.commits = 0

    async def run(self) -> None:
        client = self._client
        while True:
            if not self.is_open:
                await client.pause(200)
                continue
            if (self._coordinator is not None or await self._find()) and await self._join():
                self.generations += 1
                await self._stay()
            else:
                await client.back_off()
            # While this member rests, others must take its partitions.
            if self._chance.random() < 0.1:
                if self._chance.random() < 0.5:
                    await self._leave()
                elif self._instance is not None:
                    # A new process of the same static member, perhaps before the old one's session ended.
                    self._member_id = ""
                await client.pause(self._chance.uniform(100, 2 * SESSION_MS))

    async def _find(self) -> bool:
        self._coordinator = await self._client.find_coordinator(self._group)
        if self._coordinator is None and not self._client.brokers:
            await self._client.refresh([])
        return self._coordinator is not None

    async def _ask(self, request: Any, version: int, timeout_ms: float = 5_000) -> Any:
        assert self._coordinator is not None
        channel = f"group {self._name}"
        response = await self._client.call(
            self._coordinator, request, version, timeout_ms=timeout_ms, channel=channel
        )
        if response is None:
            self._coordinator = None
        return response

    def _moved(self, error: int) -> bool:
        """Whether there was an error. If the coordinator has moved, look for it again."""
        if error in (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
            self._coordinator = None
        return error != ErrorCode.NONE

    async def _join(self) -> bool:
        metadata = struct.pack(">h", PROTOCOL_VERSION) + encode(
            ConsumerProtocolSubscription(topics=self._subscription), PROTOCOL_VERSION
        )
        response: JoinGroupResponse | None = await self._ask(
            JoinGroupRequest(
                group_id=self._group,
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=REBALANCE_MS,
                member_id=self._member_id,
                group_instance_id=self._instance,
                protocol_type="consumer",
                protocols=[JoinGroupRequestProtocol(name="turns", metadata=metadata)],
            ),
            5,
            timeout_ms=REBALANCE_MS + 7_000,
        )
        if response is None:
            return False
        if response.error_code:
            if response.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                self._member_id = response.member_id
            elif response.error_code in GONE:
                self._member_id = ""
            self._moved(response.error_code)
            return False
        self._member_id, self._generation = response.member_id, response.generation_id
        assignments = []
        if response.leader == self._member_id:
            await self._client.refresh(self._subscription)
            assignments = self._assign(response)
        synced = await self._ask(
            SyncGroupRequest(
                group_id=self._group,
                generation_id=self._generation,
                member_id=self._member_id,
                group_instance_id=self._instance,
                assignments=assignments,
            ),
            3,
            timeout_ms=REBALANCE_MS + 7_000,
        )
        if synced is None or synced.error_code:
            if synced is not None:
                if synced.error_code in GONE:
                    self._member_id = ""
                self._moved(synced.error_code)
            return False
        if not synced.assignment:
            self._owned = []
            return True
        assignment = decode(ConsumerProtocolAssignment, PROTOCOL_VERSION, synced.assignment[2:])
        await self._client.refresh(self._subscription)
        self._owned = []
        for topic in assignment.assigned_partitions:
            places = self._client.places.get(topic.topic, [])
            for partition in topic.partitions:
                if partition < len(places):
                    place = places[partition]
                    self._owned.append(place)
                    # A static member has a new member id in each incarnation.
                    owner = self._instance or self._member_id
                    self._checkers.owners.owns(self._group, self._generation, place, owner)
        return True

    def _assign(self, joined: JoinGroupResponse) -> list[SyncGroupRequestAssignment]:
        """Assign the partitions to the members in turn."""
        members = sorted(member.member_id for member in joined.members)
        shares: dict[str, dict[str, list[int]]] = {member: {} for member in members}
        turn = 0
        for name in self._subscription:
            for place in self._client.places.get(name, []):
                shares[members[turn % len(members)]].setdefault(name, []).append(place.partition)
                turn += 1
        return [
            SyncGroupRequestAssignment(
                member_id=member,
                assignment=struct.pack(">h", PROTOCOL_VERSION)
                + encode(
                    ConsumerProtocolAssignment(
                        assigned_partitions=[
                            TopicPartition(topic=name, partitions=partitions)
                            for name, partitions in share.items()
                        ]
                    ),
                    PROTOCOL_VERSION,
                ),
            )
            for member, share in shares.items()
        ]

    async def _stay(self) -> None:
        """Work in this generation until it is over."""
        positions = await self._resume()
        if positions is None:
            return
        leaves_after = self._chance.choice([1_000_000, 1_000_000, 20, 5])
        while self.is_open and leaves_after > 0:
            leaves_after -= 1
            await self._client.pause(self._chance.uniform(200, SESSION_MS / 3))
            beat = await self._ask(
                HeartbeatRequest(
                    group_id=self._group,
                    generation_id=self._generation,
                    member_id=self._member_id,
                    group_instance_id=self._instance,
                ),
                3,
            )
            if beat is None or beat.error_code:
                if beat is not None:
                    if beat.error_code in GONE:
                        self._member_id = ""
                    self._moved(beat.error_code)
                return
            self.heartbeats += 1
            if self._owned and self._chance.random() < 0.5:
                place = self._chance.choice(self._owned)
                if not await self._advance(place, positions):
                    return
        if not self.is_open:
            await self._leave()

    async def _resume(self) -> dict[Place, int] | None:
        if not self._owned:
            return {}
        names = list(dict.fromkeys(place.topic for place in self._owned))
        response = await self._ask(
            OffsetFetchRequest(
                groups=[
                    OffsetFetchRequestGroup(
                        group_id=self._group,
                        topics=[
                            OffsetFetchRequestTopics(
                                name=name,
                                partition_indexes=[
                                    place.partition for place in self._owned if place.topic == name
                                ],
                            )
                            for name in names
                        ],
                    )
                ],
                require_stable=True,
            ),
            8,
        )
        if response is None or self._moved(response.groups[0].error_code):
            return None
        positions: dict[Place, int] = {}
        for topic in response.groups[0].topics:
            for found in topic.partitions:
                if found.error_code:
                    return None
                place = self._client.places[topic.name][found.partition_index]
                if place.topic_id not in self._topics.deleting:
                    self._checkers.commits.fetched(self._group, place, found.committed_offset, self._name)
                positions[place] = max(0, found.committed_offset)
        return positions

    async def _advance(self, place: Place, positions: dict[Place, int]) -> bool:
        """Commit a later offset, at most the end; False when this generation is over."""
        end = await list_offset(self._client, place, LATEST)
        start = await list_offset(self._client, place, EARLIEST)
        if end is None or start is None:
            await self._client.refresh([place.topic])
            return True
        offset = max(start, positions.get(place, 0))
        if offset >= end or place.topic_id in self._topics.deleting:
            return True
        offset = self._chance.randint(offset + 1, end)
        commits, generation = self._checkers.commits, self._generation
        commits.committing(self._group, place, generation, offset)
        response = await self._ask(
            OffsetCommitRequest(
                group_id=self._group,
                generation_id_or_member_epoch=generation,
                member_id=self._member_id,
                group_instance_id=self._instance,
                topics=[
                    OffsetCommitRequestTopic(
                        name=place.topic,
                        partitions=[
                            OffsetCommitRequestPartition(
                                partition_index=place.partition,
                                committed_offset=offset,
                                committed_metadata="",
                            )
                        ],
                    )
                ],
            ),
            7,
        )
        if response is None:
            return False
        error = response.topics[0].partitions[0].error_code
        if error:
            # These errors mean fenced. With others, the commit may have been written before the coordinator
            # moved.
            if error in (ErrorCode.ILLEGAL_GENERATION, *GONE):
                commits.refused(self._group, place, generation, offset)
            self._moved(error)
            return False
        commits.acked(self._group, place, generation, offset)
        positions[place] = offset
        self.commits += 1
        return True

    async def _leave(self) -> None:
        if self._coordinator is None or not self._member_id:
            return
        await self._ask(
            LeaveGroupRequest(
                group_id=self._group,
                members=[MemberIdentity(member_id=self._member_id, group_instance_id=self._instance)],
            ),
            4,
        )
        self._member_id = ""
        self._owned = []
