"""DescribeClientQuotas (0-1), answered from the committed image."""

from __future__ import annotations

from penstock.broker.broker import Broker
from penstock.broker.network.connection import Call
from penstock.metadata import quotas
from penstock.protocol.messages.quotas import DescribeClientQuotasRequest, DescribeClientQuotasResponse


def describe_client_quotas(
    broker: Broker, request: DescribeClientQuotasRequest, call: Call
) -> DescribeClientQuotasResponse:
    return quotas.describe_client_quotas(request, broker.image.security.quotas)
