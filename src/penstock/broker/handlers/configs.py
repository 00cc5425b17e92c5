"""DescribeConfigs (1-4) and ListConfigResources (0-1), answered from the committed image.

A resource that a DescribeConfigs names several times is described once, so that a small request cannot produce a
huge response.
"""

from __future__ import annotations

from penstock.broker.broker import Broker
from penstock.broker.controller.authorized import config_refusal
from penstock.broker.network.authorization import Operation
from penstock.broker.network.connection import Call
from penstock.metadata import configs
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    ListConfigResourcesResponseConfigResource,
)

RESOURCE_TYPES_SINCE_VERSION = 1
# Kafka's numbers. Penstock has no resources of the last three: broker loggers, client metrics, groups.
RESOURCE_TYPES = (TOPIC_RESOURCE, BROKER_RESOURCE, 8, 16, 32)


def describe_configs(broker: Broker, request: DescribeConfigsRequest, call: Call) -> DescribeConfigsResponse:
    once = {(resource.resource_type, resource.resource_name): resource for resource in request.resources}
    refused: list[DescribeConfigsResult] = []
    request.resources = []
    for resource in once.values():
        error = config_refusal(resource, Operation.DESCRIBE_CONFIGS, call.allows)
        if error:
            refused.append(
                DescribeConfigsResult(
                    error_code=error,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        else:
            request.resources.append(resource)
    response = configs.describe_configs(
        request, broker.image, broker.node_id, broker.config.static, broker.brokers_expected
    )
    response.results += refused
    return response


def list_config_resources(
    broker: Broker, request: ListConfigResourcesRequest, call: Call
) -> ListConfigResourcesResponse:
    types = set(request.resource_types or RESOURCE_TYPES)
    if call.version < RESOURCE_TYPES_SINCE_VERSION:
        types = set()
    elif not types.issubset(RESOURCE_TYPES):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    names = {
        TOPIC_RESOURCE: list(broker.image.topics),
        BROKER_RESOURCE: [str(member.id) for member in broker.image.reachable_brokers()],
    }
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponseConfigResource(resource_name=name, resource_type=kind)
            for kind in sorted(types & names.keys())
            for name in names[kind]
        ]
    )
