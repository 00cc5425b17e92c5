"""DescribeConfigs (1-4), AlterConfigs (0-2) and IncrementalAlterConfigs (0-1).

Reads are answered from the committed image; changes go to the controller and are answered when committed.

A resource that is named several times in a DescribeConfigs is described once: a few bytes of request may not
become a hundred settings each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.broker.connection import Call
from penstock.metadata import configs
from penstock.protocol.messages.configs import (
    AlterConfigsRequest,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
)

if TYPE_CHECKING:
    from penstock.broker.broker import Broker


def describe_configs(broker: Broker, request: DescribeConfigsRequest, call: Call) -> DescribeConfigsResponse:
    once = {(resource.resource_type, resource.resource_name): resource for resource in request.resources}
    request.resources = list(once.values())
    return configs.describe_configs(request, broker.image, broker.node_id, broker.config.static)


def alter_configs(broker: Broker, request: AlterConfigsRequest, call: Call) -> Any:
    return broker.decide(request, call)


def incremental_alter_configs(broker: Broker, request: IncrementalAlterConfigsRequest, call: Call) -> Any:
    return broker.decide(request, call)
