"""SaslHandshake (0-1), SaslAuthenticate (0-2), DescribeAcls, CreateAcls and DeleteAcls (1-3).

On a listener without SASL its requests get the error of a Kafka broker: a closed connection would tell the client
nothing. SaslHandshake 0, after which Kafka reads tokens without request headers, is answered with an error.

Authorization is not implemented yet, so its requests get the error of a Kafka broker that has not enabled it.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

NO_SASL = "this listener has no authentication; use security.protocol={}"
NO_ACLS = "there are no ACLs: authorization does not work yet, and everybody may do everything"


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


def describe_acls(broker: Broker, request: DescribeAclsRequest, call: Call) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_ACLS)


def create_acls(broker: Broker, request: CreateAclsRequest, call: Call) -> CreateAclsResponse:
    return CreateAclsResponse.for_error(request, call.version, ErrorCode.SECURITY_DISABLED, NO_ACLS)


def delete_acls(broker: Broker, request: DeleteAclsRequest, call: Call) -> DeleteAclsResponse:
    return DeleteAclsResponse.for_error(request, call.version, ErrorCode.SECURITY_DISABLED, NO_ACLS)
