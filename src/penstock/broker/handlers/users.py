"""DescribeUserScramCredentials (0), answered from the committed image.

The controller decides about AlterUserScramCredentials (``metadata/users.py``).
"""

from __future__ import annotations

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.metadata.users import describe_credentials
from penstock.protocol.messages.security import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)


def describe_user_scram_credentials(
    broker: Broker, request: DescribeUserScramCredentialsRequest, call: Call
) -> DescribeUserScramCredentialsResponse:
    return describe_credentials(broker.image.security, request)
