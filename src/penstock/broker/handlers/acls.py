"""DescribeAcls, CreateAcls and DeleteAcls (1-3).

They work only on a broker with an authorizer, as in Kafka: ACLs that nobody checks would promise what is not so.
DescribeAcls is answered from the committed image; ``metadata/acls.py`` decides about the other two.
"""

from __future__ import annotations

from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.metadata import acls
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    CreateAclsRequest,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

NO_ACLS = "this broker has no authorizer: there are no ACLs, and everybody may do everything"


def describe_acls(broker: Broker, request: DescribeAclsRequest, call: Call) -> DescribeAclsResponse:
    if not broker.has_authorizer:
        return DescribeAclsResponse(error_code=ErrorCode.SECURITY_DISABLED, error_message=NO_ACLS)
    return acls.describe_acls(broker.image.security.acls.values(), request)


def change_acls(broker: Broker, request: CreateAclsRequest | DeleteAclsRequest, call: Call) -> Any:
    if not broker.has_authorizer:
        return error_response(request, call.version, ErrorCode.SECURITY_DISABLED, NO_ACLS)
    return broker.controller.decide(request, call)
