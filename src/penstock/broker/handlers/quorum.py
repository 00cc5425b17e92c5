"""Vote (0-2), BeginQuorumEpoch (0-1), EndQuorumEpoch (0-1), DescribeQuorum (0-2), FetchSnapshot (0-1),
AddRaftVoter (0-1) and RemoveRaftVoter (0): the metadata quorum. Its Fetch comes in by ``handlers/fetch.py``.

All of them go to ``broker/quorum/consensus.py``, which answers when the core has decided. DescribeQuorum and the
changes of voters also come from operators, on the client listener; the rest come only from other nodes.

Departures from Kafka: every node answers DescribeQuorum, because new nodes find each other by it; one that does not
lead adds an error to what it knows. AddRaftVoter is answered when it is committed, whatever ``ack_when_committed``
says, and does not wait for the voter to catch up.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import WAITING, Call

# A change of voters is answered when it is committed.
LEADER_TIMEOUT_MS = 10_000


def ask_node(broker: Broker, request: Any, call: Call) -> Any:
    return broker.consensus.handle(request, call)


def ask_leader(broker: Broker, request: Any, call: Call) -> Any:
    """Forward an operator's request to the quorum leader. Requests of other nodes are answered here."""
    leader, handle = broker.consensus.leader_id, broker.consensus.handle
    if call.is_internal or leader is None or leader == broker.node_id:
        return handle(request, call)

    def answered(response: Any | None) -> None:
        if response is not None:
            call.answer(response)
            return
        own = handle(request, call)
        if own is not WAITING:
            call.answer(own)

    broker.peers.call(
        leader, "quorum-operator", request, call.version, answered, timeout_ms=LEADER_TIMEOUT_MS
    )
    return WAITING
