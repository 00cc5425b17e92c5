"""The topics of a run, shared by the clients that create, use and delete them."""

from __future__ import annotations

from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.sim.client import Client, Place

EARLIEST = -2
LATEST = -1
# Topics with this in their name may be deleted and created again: clients use their ids only.
MORTAL = "mortal"
# The topic that only a ``Recreator`` deletes and creates again.
RECREATED = f"{MORTAL}-again"
# Topics that are written in transactions, and the one whose records are processed in transactions.
ACCOUNTS = "accounts"
OUTPUTS = "outputs"
INPUTS = "inputs"
TRANSACTIONAL = (ACCOUNTS, OUTPUTS)
# Written in transactions too, and deleted and created again meanwhile. What clients read of it is not checked.
RECEIPTS = "receipts"
# Compacted topics: the second one is deleted and created again.
TABLE = "table"
COMPACTED = (TABLE, f"{MORTAL}-table")


class Topics:
    def __init__(self) -> None:
        # Existing topics, as far as any client knows: name -> id.
        self.existing: dict[str, bytes] = {}
        # The same for topics that are written in transactions. They are never deleted.
        self.transactional: dict[str, bytes] = {}
        # The same for the receipts.
        self.receipts: dict[str, bytes] = {}
        # The same for compacted topics.
        self.compacted: dict[str, bytes] = {}
        # By id: topics that are being or have been deleted. Nothing is guaranteed for them.
        self.deleting: dict[bytes, None] = {}
        # By id: when a client first knew of it.
        self.since_ms: dict[bytes, float] = {}

    def known(self, name: str) -> dict[str, bytes]:
        """Where the topic of this name is noted."""
        if name in TRANSACTIONAL:
            return self.transactional
        if name in COMPACTED:
            return self.compacted
        return self.receipts if name == RECEIPTS else self.existing

    def alive(self) -> list[str]:
        return [name for name, topic_id in self.existing.items() if topic_id not in self.deleting]

    def alive_compacted(self) -> list[str]:
        return [name for name, topic_id in self.compacted.items() if topic_id not in self.deleting]


async def list_offset(client: Client, place: Place, which: int) -> int | None:
    """An offset of a partition from its leader (EARLIEST, LATEST or by time); None without a valid response."""
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
