"""The topics of a run, as the clients that make, use and delete them know of each other's doings."""

from __future__ import annotations

from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.sim.client import Client, Place

EARLIEST = -2
LATEST = -1
# Topics with this in their name may be deleted, and made again: clients name them by their ids only.
MORTAL = "mortal"
# The one that a ``Recreator`` deletes and makes again, and nobody else.
RECREATED = f"{MORTAL}-again"


class Topics:
    def __init__(self) -> None:
        # Those that exist, as far as anybody was told: name -> id.
        self.existing: dict[str, bytes] = {}
        # By id. Being deleted, or deleted: nothing about them is certain any more.
        self.deleting: dict[bytes, None] = {}
        # By id: when somebody was first told of it.
        self.since_ms: dict[bytes, float] = {}

    def alive(self) -> list[str]:
        return [name for name, topic_id in self.existing.items() if topic_id not in self.deleting]


async def list_offset(client: Client, place: Place, which: int) -> int | None:
    """Where a partition begins or ends, from its leader; None when it does not say."""
    leadership = client.leader(place)
    if leadership is None:
        return None
    request = ListOffsetsRequest(
        replica_id=-1,
        topics=[
            ListOffsetsTopic(
                name=place.topic,
                partitions=[ListOffsetsPartition(partition_index=place.partition, timestamp=which)],
            )
        ],
    )
    response = await client.call(leadership.broker, request, 5)
    if response is None:
        return None
    found = response.topics[0].partitions[0]
    return None if found.error_code else found.offset
