"""Which function handles which API. Handler modules are imported when their API is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.broker.network.connection import Route
from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.schema import encoder

HANDLERS = {
    0: ("produce", "produce"),
    1: ("fetch", "fetch"),
    2: ("offsets", "list_offsets"),
    3: ("topics", "metadata"),
    8: ("groups", "offset_commit"),
    9: ("groups", "offset_fetch"),
    10: ("groups", "find_coordinator"),
    11: ("groups", "join_group"),
    12: ("groups", "heartbeat"),
    13: ("groups", "leave_group"),
    14: ("groups", "sync_group"),
    15: ("groups", "describe_groups"),
    16: ("groups", "list_groups"),
    17: ("security", "sasl_handshake"),
    18: ("cluster", "api_versions"),
    19: ("topics", "create_topics"),
    20: ("topics", "delete_topics"),
    21: ("offsets", "delete_records"),
    22: ("produce", "init_producer_id"),
    23: ("offsets", "offset_for_leader_epoch"),
    29: ("security", "describe_acls"),
    30: ("security", "create_acls"),
    31: ("security", "delete_acls"),
    32: ("configs", "describe_configs"),
    33: ("configs", "alter_configs"),
    36: ("security", "sasl_authenticate"),
    37: ("topics", "create_partitions"),
    42: ("groups", "delete_groups"),
    44: ("configs", "incremental_alter_configs"),
    47: ("groups", "offset_delete"),
    60: ("cluster", "describe_cluster"),
    35: ("placement", "describe_log_dirs"),
    43: ("placement", "elect_leaders"),
    45: ("placement", "alter_partition_reassignments"),
    46: ("placement", "list_partition_reassignments"),
    52: ("quorum", "vote"),
    53: ("quorum", "begin_quorum_epoch"),
    54: ("quorum", "end_quorum_epoch"),
    55: ("quorum", "describe_quorum"),
    56: ("brokers", "alter_partition"),
    59: ("quorum", "fetch_snapshot"),
    62: ("brokers", "broker_registration"),
    63: ("brokers", "broker_heartbeat"),
    64: ("brokers", "unregister_broker"),
    67: ("brokers", "allocate_producer_ids"),
    68: ("groups", "consumer_group_heartbeat"),
    73: ("brokers", "assign_replicas_to_dirs"),
    74: ("configs", "list_config_resources"),
    75: ("topics", "describe_topic_partitions"),
    80: ("quorum", "add_raft_voter"),
    81: ("quorum", "remove_raft_voter"),
}

assert HANDLERS.keys() == APIS.keys(), "every advertised API has a handler"


def make_route(key: int, version: int, listener: str) -> Route | None:
    """None when the API or its version is not served on this listener."""
    api = APIS.get(key)
    if api is None or listener not in api.listeners:
        return None
    if not api.serves(version):
        return _unsupported_api_versions() if key == API_VERSIONS else None
    return Route(
        version,
        api.decode_request[version],
        api.encode_response[version],
        _handler(*HANDLERS[key]),
        flexible_request=api.request_header_version(version) == 2,
        flexible_response=api.response_header_version(version) == 1,
    )


def _unsupported_api_versions() -> Route:
    return Route(
        0,
        lambda frame, position: (None, position),
        encoder(APIS[API_VERSIONS].response, 0),
        _handler("cluster", "unsupported_api_versions"),
        flexible_request=False,
        flexible_response=False,
    )


def _handler(module: str, function: str) -> Any:
    return getattr(import_module(f"penstock.broker.handlers.{module}"), function)
