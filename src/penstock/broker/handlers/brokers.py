"""Registration of brokers: BrokerRegistration (0-4), BrokerHeartbeat (0-2) and UnregisterBroker (0).

The first two come in on the internal listener. A broker sends its heartbeats on one connection. When that
connection ends and the broker's address refuses new ones, its process has died, and the controller does not wait
for the end of the session.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    BrokerHeartbeatRequest,
    BrokerRegistrationRequest,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)


def broker_registration(broker: Broker, request: BrokerRegistrationRequest, call: Call) -> Any:
    broker.connections_of_brokers.registering(request.broker_id)
    return broker.controller.decide(request, call)


def broker_heartbeat(broker: Broker, request: BrokerHeartbeatRequest, call: Call) -> Any:
    broker.connections_of_brokers.heard(call.connection, request.broker_id, request.broker_epoch)
    return broker.controller.decide(request, call)


def unregister_broker(broker: Broker, request: UnregisterBrokerRequest, call: Call) -> Any:
    """Remove a broker for good. Unlike Kafka, refuse if it is running: its replicas would be given up."""
    known = broker.image.brokers.get(BrokerId(request.broker_id))
    if known is not None and not known.fenced:
        return UnregisterBrokerResponse(
            error_code=ErrorCode.INVALID_REQUEST,
            error_message=f"Broker {known.id} is running; stop it first.",
        )
    return broker.controller.decide(request, call)
