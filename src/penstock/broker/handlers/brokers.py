"""What brokers say to the controller: AlterPartition (2-3), BrokerRegistration (0-4), BrokerHeartbeat (0-2),
UnregisterBroker (0), AllocateProducerIds (0) and AssignReplicasToDirs (0).

All but UnregisterBroker come on the internal listener. A broker's heartbeats keep to one connection, so when
that ends and nobody listens at the broker's address any more, its process has died, and the controller need
not wait for the session to run out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.broker.network.connection import Call
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AllocateProducerIdsRequest,
    AlterPartitionRequest,
    AssignReplicasToDirsRequest,
    BrokerHeartbeatRequest,
    BrokerRegistrationRequest,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker


def broker_registration(broker: Broker, request: BrokerRegistrationRequest, call: Call) -> Any:
    broker.connections_of_brokers.registering(request.broker_id)
    return broker.controller.decide(request, call)


def broker_heartbeat(broker: Broker, request: BrokerHeartbeatRequest, call: Call) -> Any:
    broker.connections_of_brokers.heard(call.connection, request.broker_id, request.broker_epoch)
    return broker.controller.decide(request, call)


def alter_partition(broker: Broker, request: AlterPartitionRequest, call: Call) -> Any:
    return broker.controller.decide(request, call)


def unregister_broker(broker: Broker, request: UnregisterBrokerRequest, call: Call) -> Any:
    """Forget a broker for good. Not one that runs, as Kafka would: all that rests on it would be given up."""
    known = broker.image.brokers.get(BrokerId(request.broker_id))
    if known is not None and not known.fenced:
        return UnregisterBrokerResponse(
            error_code=ErrorCode.INVALID_REQUEST,
            error_message=f"Broker {known.id} is running; stop it first.",
        )
    return broker.controller.decide(request, call)


def allocate_producer_ids(broker: Broker, request: AllocateProducerIdsRequest, call: Call) -> Any:
    return broker.controller.decide(request, call)


def assign_replicas_to_dirs(broker: Broker, request: AssignReplicasToDirsRequest, call: Call) -> Any:
    return broker.controller.decide(request, call)
