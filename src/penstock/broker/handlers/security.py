"""SaslHandshake (0-1) and SaslAuthenticate (0-2).

Authentication is not implemented yet. These requests get the error of a Kafka broker that has not enabled it: a
closed connection would tell the client nothing.
"""

from __future__ import annotations

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


def sasl_handshake(broker: Broker, request: SaslHandshakeRequest, call: Call) -> SaslHandshakeResponse:
    return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])


def sasl_authenticate(
    broker: Broker, request: SaslAuthenticateRequest, call: Call
) -> SaslAuthenticateResponse:
    advice = NO_SASL.format(call.listener.security_protocol.name)
    return SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=advice)
