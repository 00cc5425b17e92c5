"""A client whose rights come and go, and the one who gives them and takes them away.

The guest has a topic of its own, to which it writes and from which it reads when an ACL for its host allows it.
Once a broker has applied that the ACL is gone, no request of the guest may succeed there, whatever the guest could
do before on the same connection. What the broker has applied is looked up in its image, which is not how the
broker decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.metadata.authorizer import ALLOW, LITERAL, Operation, ResourceType
from penstock.metadata.security import Acl, acl_record
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from penstock.protocol.messages.metadata_records import RemoveAccessControlEntryRecord
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.records import encode_batch
from penstock.protocol.schema import Message
from penstock.sim.client import Client, Place
from penstock.sim.cluster import Cluster, Machine
from penstock.sim.report import Violation

GUEST = "guest"
GUARDED = "guarded"
# A topic with an ACL is closed to all others, also when the guest's are gone.
_KEEPER = Acl(ResourceType.TOPIC, GUARDED, LITERAL, "User:keeper", "*", Operation.READ, ALLOW)
_RIGHTS = tuple(
    Acl(ResourceType.TOPIC, GUARDED, LITERAL, "User:*", GUEST, operation, ALLOW)
    for operation in (Operation.READ, Operation.WRITE)
)
CREATE_VERSION, PRODUCE_VERSION, FETCH_VERSION = 7, 9, 12
POLL_MS = 500


class Guest:
    def __init__(self, client: Client, cluster: Cluster, *, copies: int) -> None:
        self.process = client.process
        self._client = client
        self._cluster = cluster
        self._copies = copies
        self._succeeded = self._denied = self._looked_at = 0

    def counts(self) -> dict[str, int]:
        return {
            "guest succeeded": self._succeeded,
            "guest denied": self._denied,
            "guest had no right": self._looked_at,
        }

    async def run(self) -> None:
        await self._create()
        chance = self._client.chance
        while True:
            await self._client.pause(chance.expovariate(1 / 200))
            places = self._client.places.get(GUARDED)
            leadership = None if not places else self._client.leader(places[0])
            if places is None or leadership is None or chance.random() < 0.1:
                # Denied as long as the guest has no right; the last leader may still lead then.
                await self._client.refresh([GUARDED])
                continue
            machine = self._cluster.machines[leadership.broker]
            if chance.random() < 0.5:
                await self._produce(machine, places[0])
            else:
                await self._fetch(machine, places[0])

    async def _create(self) -> None:
        topic = CreatableTopic(name=GUARDED, num_partitions=1, replication_factor=self._copies)
        while not self._client.places.get(GUARDED):
            await self._client.call(None, CreateTopicsRequest(topics=[topic]), CREATE_VERSION)
            await self._client.refresh([GUARDED])
            await self._client.back_off()

    async def _produce(self, machine: Machine, place: Place) -> None:
        records = memoryview(encode_batch([(int(self.process.loop.now_ms), None, b"guest", [])]))
        data = PartitionProduceData(index=place.partition, records=records)
        request = ProduceRequest(
            acks=1, timeout_ms=2_000, topic_data=[TopicProduceData(name=GUARDED, partition_data=[data])]
        )
        answer = await self._watched(machine, request, PRODUCE_VERSION)
        if answer is not None:
            self._learn(answer.responses[0].partition_responses[0].error_code)

    async def _fetch(self, machine: Machine, place: Place) -> None:
        wanted = FetchPartition(partition=place.partition, fetch_offset=0, partition_max_bytes=10_000)
        request = FetchRequest(
            max_wait_ms=POLL_MS,
            min_bytes=1,
            topics=[FetchTopic(topic=GUARDED, partitions=[wanted])],
        )
        answer = await self._watched(machine, request, FETCH_VERSION)
        if answer is not None:
            self._learn(answer.responses[0].partitions[0].error_code)

    def _learn(self, error: int) -> None:
        self._denied += error != 0
        self._succeeded += error == 0

    async def _watched(self, machine: Machine, request: Message, version: int) -> Any:
        """The answer to a request, which must not be a success if the broker knew all the time of no right.

        None if there is no answer, or one without a word about the partition.
        """
        node = machine.node
        closed = None if node is None else _closed(node.image.security.acls)
        answer = await self._client.call(machine.node_id, request, version)
        if isinstance(answer, FetchResponse) and not answer.responses:
            return None  # over its quota, which is all that it is told
        if closed is None or node is None or answer is None or machine.node is not node:
            return answer
        # Each change of ACLs makes another mapping, so there was none meanwhile.
        if node.image.security.acls is closed:
            self._looked_at += 1
            if not answer.first_error():
                raise Violation(
                    f"the guest has no right, as {machine} knew, but {type(request).__name__} succeeded"
                )
        return answer


class Warden:
    """Gives the guest its rights and takes them away, through whichever controller is active."""

    def __init__(self, client: Client, cluster: Cluster) -> None:
        self.process = client.process
        self._client = client
        self._cluster = cluster

    async def run(self) -> None:
        while True:
            await self._client.pause(self._client.chance.expovariate(1 / 1_500))
            for machine in self._cluster.running:
                node, process = machine.node, machine.process
                if node is not None and process is not None and node.is_controller:
                    process.spawn.soon(lambda node=node: node.change_acls(self._changes))  # type: ignore[misc]

    def _changes(self, acls: Mapping[bytes, Acl]) -> list[Message]:
        given = [id for id, acl in acls.items() if acl in _RIGHTS]
        changes: list[Message] = [RemoveAccessControlEntryRecord(id=id) for id in given]
        added = () if given else _RIGHTS
        if _KEEPER not in acls.values():
            added = (*added, _KEEPER)
        return changes + [acl_record(self._client.chance.randbytes(16), acl) for acl in added]


def _closed(acls: Mapping[bytes, Acl]) -> Mapping[bytes, Acl] | None:
    """The ACLs, if they give the guest no right."""
    is_guarded = _KEEPER in acls.values()
    return acls if is_guarded and not any(acl in _RIGHTS for acl in acls.values()) else None
