"""Requests that go to the controller unchanged, and are answered when its decision is committed.

DeleteTopics (1-6), CreatePartitions (0-3), AlterConfigs (0-2), IncrementalAlterConfigs (0-1), ElectLeaders (0-2),
AlterPartitionReassignments (0-1), ListPartitionReassignments (0), AlterClientQuotas (0-1), UpdateFeatures (0-2),
AlterUserScramCredentials (0), AlterPartition (2-3), AllocateProducerIds (0) and AssignReplicasToDirs (0).

The last three come from other brokers only, and so does Envelope (0), which has a request of a client in it.
``metadata/controller.py`` decides all of them.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.protocol.messages.forwarding import EnvelopeRequest
from penstock.protocol.schema import Message


def decide(broker: Broker, request: Message, call: Call) -> Any:
    return broker.controller.decide(request, call)


def envelope(broker: Broker, request: EnvelopeRequest, call: Call) -> Any:
    return broker.controller.open(request, call)
