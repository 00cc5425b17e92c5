"""The table of routes: the function that handles each API, and the rights that its requests need.

Handler modules are imported when their API is first used. The rights are Kafka's. A right on the cluster or on the
request's one group is checked before the handler runs. All others are checked by the handler, for each resource
that the request names (``network/authorization.py``).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from penstock.broker.handlers.mutation_quota import STRICT_SINCE_VERSION, within_quota
from penstock.broker.network.authorization import (
    Operation,
    ResourceType,
    Right,
    on_cluster,
    on_its_group,
)
from penstock.broker.network.connection import Route
from penstock.broker.network.response_errors import errors_to_count
from penstock.protocol.apis import API_VERSIONS, APIS
from penstock.protocol.schema import encoder

READ, WRITE, CREATE, DELETE = Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE
ALTER, DESCRIBE, CLUSTER_ACTION = Operation.ALTER, Operation.DESCRIBE, Operation.CLUSTER_ACTION
DESCRIBE_CONFIGS, ALTER_CONFIGS = Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS
IDEMPOTENT_WRITE = Operation.IDEMPOTENT_WRITE
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
TRANSACTIONAL_ID = ResourceType.TRANSACTIONAL_ID
# For the configs of topics, of brokers, or of groups.
ON_CONFIGS = (Right(ALTER_CONFIGS, TOPIC), Right(ALTER_CONFIGS, CLUSTER), Right(ALTER_CONFIGS, GROUP))


class Handler(NamedTuple):
    module: str
    function: str
    rights: tuple[Right, ...]


def _handler(module: str, function: str, *rights: Right) -> Handler:
    return Handler(module, function, rights)


HANDLERS = {
    0: _handler("produce", "produce", Right(WRITE, TOPIC), Right(WRITE, TRANSACTIONAL_ID)),
    1: _handler("fetch", "fetch", Right(READ, TOPIC), Right(CLUSTER_ACTION, CLUSTER)),
    2: _handler("offsets", "list_offsets", Right(DESCRIBE, TOPIC)),
    3: _handler("topics", "metadata", Right(DESCRIBE, TOPIC), Right(CREATE, TOPIC), Right(CREATE, CLUSTER)),
    8: _handler("groups", "offset_commit", on_its_group(READ), Right(READ, TOPIC)),
    9: _handler("groups", "offset_fetch", Right(DESCRIBE, GROUP), Right(DESCRIBE, TOPIC)),
    10: _handler("groups", "find_coordinator", Right(DESCRIBE, GROUP), Right(DESCRIBE, TRANSACTIONAL_ID)),
    11: _handler("groups", "join_group", on_its_group(READ)),
    12: _handler("groups", "heartbeat", on_its_group(READ)),
    13: _handler("groups", "leave_group", on_its_group(READ)),
    14: _handler("groups", "sync_group", on_its_group(READ)),
    15: _handler("groups", "describe_groups", Right(DESCRIBE, GROUP)),
    16: _handler("groups", "list_groups", Right(DESCRIBE, GROUP), Right(DESCRIBE, CLUSTER)),
    17: _handler("security", "sasl_handshake"),
    18: _handler("cluster", "api_versions"),
    19: _handler("topics", "create_topics", Right(CREATE, TOPIC), Right(CREATE, CLUSTER)),
    20: _handler("controller", "decide", Right(DELETE, TOPIC)),  # DeleteTopics
    21: _handler("offsets", "delete_records", Right(DELETE, TOPIC)),
    22: _handler(
        "produce", "init_producer_id", Right(WRITE, TRANSACTIONAL_ID), Right(IDEMPOTENT_WRITE, CLUSTER)
    ),
    23: _handler("offsets", "offset_for_leader_epoch", Right(DESCRIBE, TOPIC)),
    24: _handler(
        "transactions", "add_partitions_to_txn", Right(WRITE, TRANSACTIONAL_ID), Right(WRITE, TOPIC)
    ),
    25: _handler("transactions", "add_offsets_to_txn", Right(WRITE, TRANSACTIONAL_ID), Right(READ, GROUP)),
    26: _handler("transactions", "end_txn", Right(WRITE, TRANSACTIONAL_ID)),
    27: _handler("transactions", "write_txn_markers", Right(ALTER, CLUSTER), Right(CLUSTER_ACTION, CLUSTER)),
    28: _handler(
        "transactions",
        "txn_offset_commit",
        Right(WRITE, TRANSACTIONAL_ID),
        Right(READ, GROUP),
        Right(READ, TOPIC),
    ),
    29: _handler("acls", "describe_acls", on_cluster(DESCRIBE)),
    30: _handler("acls", "change_acls", on_cluster(ALTER)),  # CreateAcls
    31: _handler("acls", "change_acls", on_cluster(ALTER)),  # DeleteAcls
    32: _handler(
        "configs",
        "describe_configs",
        Right(DESCRIBE_CONFIGS, TOPIC),
        Right(DESCRIBE_CONFIGS, CLUSTER),
        Right(DESCRIBE_CONFIGS, GROUP),
    ),
    33: _handler("controller", "decide", *ON_CONFIGS),  # AlterConfigs
    35: _handler("placement", "describe_log_dirs", on_cluster(DESCRIBE)),
    36: _handler("security", "sasl_authenticate"),
    37: _handler("controller", "decide", Right(ALTER, TOPIC)),  # CreatePartitions
    42: _handler("groups", "delete_groups", Right(DELETE, GROUP)),
    43: _handler("controller", "decide", on_cluster(ALTER)),  # ElectLeaders
    44: _handler("controller", "decide", *ON_CONFIGS),  # IncrementalAlterConfigs
    45: _handler("controller", "decide", on_cluster(ALTER)),  # AlterPartitionReassignments
    46: _handler("controller", "decide", on_cluster(DESCRIBE)),  # ListPartitionReassignments
    47: _handler("groups", "offset_delete", on_its_group(DELETE), Right(READ, TOPIC)),
    48: _handler("quotas", "describe_client_quotas", on_cluster(DESCRIBE_CONFIGS)),
    49: _handler("controller", "decide", on_cluster(ALTER_CONFIGS)),  # AlterClientQuotas
    50: _handler("users", "describe_user_scram_credentials", on_cluster(DESCRIBE)),
    51: _handler("controller", "decide", on_cluster(ALTER)),  # AlterUserScramCredentials
    52: _handler("quorum", "ask_node", on_cluster(CLUSTER_ACTION)),  # Vote
    53: _handler("quorum", "ask_node", on_cluster(CLUSTER_ACTION)),  # BeginQuorumEpoch
    54: _handler("quorum", "ask_node", on_cluster(CLUSTER_ACTION)),  # EndQuorumEpoch
    55: _handler("quorum", "ask_leader", on_cluster(DESCRIBE)),  # DescribeQuorum
    56: _handler("controller", "decide", on_cluster(CLUSTER_ACTION)),  # AlterPartition
    57: _handler("controller", "decide", on_cluster(ALTER)),  # UpdateFeatures
    58: _handler("controller", "envelope", on_cluster(CLUSTER_ACTION)),
    59: _handler("quorum", "ask_node", on_cluster(CLUSTER_ACTION)),  # FetchSnapshot
    60: _handler("cluster", "describe_cluster"),
    61: _handler("transactions", "describe_producers", Right(READ, TOPIC)),
    62: _handler("brokers", "broker_registration", on_cluster(CLUSTER_ACTION)),
    63: _handler("brokers", "broker_heartbeat", on_cluster(CLUSTER_ACTION)),
    64: _handler("brokers", "unregister_broker", on_cluster(ALTER)),
    65: _handler("transactions", "describe_transactions", Right(DESCRIBE, TRANSACTIONAL_ID)),
    66: _handler("transactions", "list_transactions", Right(DESCRIBE, TRANSACTIONAL_ID)),
    67: _handler("controller", "decide", on_cluster(CLUSTER_ACTION)),  # AllocateProducerIds
    68: _handler("groups", "consumer_group_heartbeat", on_its_group(READ), Right(DESCRIBE, TOPIC)),
    73: _handler("controller", "decide", on_cluster(CLUSTER_ACTION)),  # AssignReplicasToDirs
    74: _handler("configs", "list_config_resources", on_cluster(DESCRIBE_CONFIGS)),
    75: _handler("topics", "describe_topic_partitions", Right(DESCRIBE, TOPIC)),
    80: _handler("quorum", "ask_leader", on_cluster(ALTER)),  # AddRaftVoter
    81: _handler("quorum", "ask_leader", on_cluster(ALTER)),  # RemoveRaftVoter
}

assert HANDLERS.keys() == APIS.keys(), "every advertised API has a handler"


def make_route(key: int, version: int, listener: str) -> Route | None:
    """None when the API or its version is not served on this listener."""
    api = APIS.get(key)
    if api is None or listener not in api.listeners:
        return None
    if not api.serves(version, listener):
        return _unsupported_api_versions() if key == API_VERSIONS else None
    handler = HANDLERS[key]
    function = _function(handler.module, handler.function)
    return Route(
        version,
        api.decode_request[version],
        api.encode_response[version],
        within_quota(function) if key in STRICT_SINCE_VERSION else function,
        handler.rights,
        flexible_request=api.request_header_version(version) == 2,
        flexible_response=api.response_header_version(version) == 1,
        key=key,
        find_errors=errors_to_count(key),
    )


def _unsupported_api_versions() -> Route:
    return Route(
        0,
        lambda frame, position: (None, position),
        encoder(APIS[API_VERSIONS].response, 0),
        _function("cluster", "unsupported_api_versions"),
        (),
        flexible_request=False,
        flexible_response=False,
    )


def _function(module: str, function: str) -> Any:
    return getattr(import_module(f"penstock.broker.handlers.{module}"), function)
