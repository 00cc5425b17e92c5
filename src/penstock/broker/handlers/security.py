"""SaslHandshake (0-1) and SaslAuthenticate (0-2).

On a listener without SASL its requests get the error of a Kafka broker: a closed connection would tell the client
nothing. SaslHandshake 0, after which Kafka reads tokens without request headers, is answered with an error.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

NO_SASL = "this listener has no authentication; use security.protocol={}"


def sasl_handshake(broker: Broker, request: SaslHandshakeRequest, call: Call) -> Any:
    connection = call.connection
    if connection.authentication is not None:
        return connection.sasl.handshake(call, connection.authentication, request)
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])


def sasl_authenticate(broker: Broker, request: SaslAuthenticateRequest, call: Call) -> Any:
    connection = call.connection
    if connection.authentication is not None:
        return connection.sasl.authenticate(call, connection.authentication, request)
    advice = NO_SASL.format(call.listener.security_protocol.name)
    return SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=advice)
