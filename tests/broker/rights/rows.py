"""The matrix of rights: for each API that clients may use, what is needed, and a request that needs it.

A row without rights is for everybody. ``told`` is what a client with exactly these rights gets: no error, a certain
one, or with None anything that is not about rights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.broker.network.authorization import CLUSTER_NAME, DENIED, Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import (
    brokers,
    cluster,
    configs,
    consumer_groups,
    fetch,
    groups,
    metadata_records,
    offsets,
    placement,
    produce,
    quorum,
    quotas,
    security,
    topics,
    transactions,
)
from penstock.protocol.schema import Message
from tests.broker.rights.scene import Needed, commit_request, produce_request

READ, WRITE, CREATE, DELETE = Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE
ALTER, DESCRIBE = Operation.ALTER, Operation.DESCRIBE
DESCRIBE_CONFIGS, ALTER_CONFIGS = Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS
OK = ErrorCode.NONE


@dataclass(frozen=True)
class Row:
    version: int
    request: Callable[[dict[str, tuple[int, int]]], Message]
    needs: tuple[Needed, ...]
    told: ErrorCode | None = OK
    # For a list, which leaves out what the client may not see: what it has without the right.
    hides: Callable[[Any], bool] | None = None
    name: str = ""

    def denied(self, missing: Needed) -> ErrorCode:
        return DENIED[missing[1]]


def topic(operation: Operation, name: str = "t") -> Needed:
    return (operation, ResourceType.TOPIC, name)


def group(operation: Operation, name: str = "g") -> Needed:
    return (operation, ResourceType.GROUP, name)


def transactional(operation: Operation, name: str = "x") -> Needed:
    return (operation, ResourceType.TRANSACTIONAL_ID, name)


def in_cluster(operation: Operation) -> Needed:
    return (operation, ResourceType.CLUSTER, CLUSTER_NAME)


def row(version: int, request: Message, *needs: Needed, **more: Any) -> Row:
    return Row(version, lambda _: request, needs, **more)


def with_producer(
    version: int, make: Callable[[int, int], Message], *needs: Needed, of: str = "x", **more: Any
) -> Row:
    return Row(version, lambda producers: make(*producers[of]), needs, **more)


# What a test prepares.
TOPICS = ("t", "deleted", "cut", "grown", "altered")
GROUPS = ("g", "deleted", "cut")
TRANSACTIONAL_IDS = ("x", "added", "offsets")


def alter(kind: int, name: str, setting: str) -> configs.IncrementalAlterConfigsRequest:
    change = configs.IncrementalAlterableConfig(name=setting, config_operation=0, value="20000")
    resource = configs.IncrementalAlterConfigsResource(
        resource_type=kind, resource_name=name, configs=[change]
    )
    return configs.IncrementalAlterConfigsRequest(resources=[resource])


def replace_configs(kind: int, name: str, setting: str) -> configs.AlterConfigsRequest:
    change = configs.AlterableConfig(name=setting, value="20000")
    resource = configs.AlterConfigsResource(resource_type=kind, resource_name=name, configs=[change])
    return configs.AlterConfigsRequest(resources=[resource])


def describe_configs(kind: int, name: str) -> configs.DescribeConfigsRequest:
    resource = configs.DescribeConfigsResource(resource_type=kind, resource_name=name)
    return configs.DescribeConfigsRequest(resources=[resource])


def fetch_request(name: str = "t", **fields: Any) -> fetch.FetchRequest:
    partition = fetch.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    return fetch.FetchRequest(topics=[fetch.FetchTopic(topic=name, partitions=[partition])], **fields)


def create_topics(name: str) -> topics.CreateTopicsRequest:
    return topics.CreateTopicsRequest(
        topics=[topics.CreatableTopic(name=name, num_partitions=1, replication_factor=1)]
    )


def markers() -> transactions.WriteTxnMarkersRequest:
    marker = transactions.WritableTxnMarker(
        producer_id=99,
        producer_epoch=0,
        transaction_result=False,
        topics=[transactions.WritableTxnMarkerTopic(name="t", partition_indexes=[0])],
        coordinator_epoch=-1,
    )
    return transactions.WriteTxnMarkersRequest(markers=[marker])


def commit_in_transaction(producer_id: int, epoch: int) -> transactions.TxnOffsetCommitRequest:
    partition = transactions.TxnOffsetCommitRequestPartition(
        partition_index=0, committed_offset=1, committed_metadata=""
    )
    return transactions.TxnOffsetCommitRequest(
        transactional_id="offsets",
        group_id="g",
        producer_id=producer_id,
        producer_epoch=epoch,
        topics=[transactions.TxnOffsetCommitRequestTopic(name="t", partitions=[partition])],
    )


ROWS: dict[str, tuple[Row, ...]] = {
    "Produce": (
        row(9, produce_request("t"), topic(WRITE)),
        with_producer(
            12,
            lambda producer_id, epoch: produce_request(
                "t",
                transactional_id="x",
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=0,
                transactional=True,
            ),
            transactional(WRITE),
            topic(WRITE),
            name="in a transaction",
        ),
    ),
    "Fetch": (row(12, fetch_request(), topic(READ)),),
    "ListOffsets": (
        row(
            6,
            offsets.ListOffsetsRequest(
                replica_id=-1,
                topics=[
                    offsets.ListOffsetsTopic(
                        name="t", partitions=[offsets.ListOffsetsPartition(partition_index=0, timestamp=-2)]
                    )
                ],
            ),
            topic(DESCRIBE),
        ),
    ),
    "Metadata": (
        row(
            9,
            topics.MetadataRequest(
                topics=[topics.MetadataRequestTopic(name="t")], allow_auto_topic_creation=True
            ),
            topic(DESCRIBE),
        ),
        row(
            9,
            topics.MetadataRequest(
                topics=[topics.MetadataRequestTopic(name="made")], allow_auto_topic_creation=True
            ),
            topic(DESCRIBE, "made"),
            topic(CREATE, "made"),
            name="of a new topic",
        ),
        row(
            9,
            topics.MetadataRequest(topics=None),
            topic(DESCRIBE),
            hides=lambda response: not response.topics,
            name="of all topics",
        ),
    ),
    "OffsetCommit": (row(8, commit_request("g", "t"), group(READ), topic(READ)),),
    "OffsetFetch": (
        row(
            7,
            groups.OffsetFetchRequest(
                group_id="g", topics=[groups.OffsetFetchRequestTopic(name="t", partition_indexes=[0])]
            ),
            group(DESCRIBE),
            topic(DESCRIBE),
        ),
    ),
    "FindCoordinator": (
        row(4, groups.FindCoordinatorRequest(coordinator_keys=["g"]), group(DESCRIBE)),
        row(
            4,
            groups.FindCoordinatorRequest(coordinator_keys=["x"], key_type=1),
            transactional(DESCRIBE),
            name="of transactions",
        ),
        row(3, groups.FindCoordinatorRequest(key="g"), group(DESCRIBE), name="of one group"),
    ),
    "JoinGroup": (
        row(
            5,
            groups.JoinGroupRequest(
                group_id="g",
                session_timeout_ms=10_000,
                rebalance_timeout_ms=10_000,
                protocol_type="consumer",
                protocols=[groups.JoinGroupRequestProtocol(name="range", metadata=b"")],
            ),
            group(READ),
            told=ErrorCode.MEMBER_ID_REQUIRED,
        ),
    ),
    "Heartbeat": (
        row(
            4,
            groups.HeartbeatRequest(group_id="g", member_id="m"),
            group(READ),
            told=ErrorCode.UNKNOWN_MEMBER_ID,
        ),
    ),
    "LeaveGroup": (
        row(
            5,
            groups.LeaveGroupRequest(group_id="g", members=[groups.MemberIdentity(member_id="m")]),
            group(READ),
            told=ErrorCode.UNKNOWN_MEMBER_ID,
        ),
    ),
    "SyncGroup": (
        row(
            4,
            groups.SyncGroupRequest(group_id="g", member_id="m"),
            group(READ),
            told=ErrorCode.UNKNOWN_MEMBER_ID,
        ),
    ),
    "DescribeGroups": (row(5, groups.DescribeGroupsRequest(groups=["g"]), group(DESCRIBE)),),
    "ListGroups": (
        row(4, groups.ListGroupsRequest(), group(DESCRIBE), hides=lambda response: not response.groups),
        row(
            4,
            groups.ListGroupsRequest(),
            in_cluster(DESCRIBE),
            hides=lambda response: not response.groups,
            name="by the cluster",
        ),
    ),
    "SaslHandshake": (row(1, security.SaslHandshakeRequest(mechanism="PLAIN"), told=None),),
    "ApiVersions": (row(2, cluster.ApiVersionsRequest()),),
    "CreateTopics": (
        row(4, create_topics("mine"), topic(CREATE, "mine")),
        row(
            4,
            create_topics("ours"),
            # It stands for a right on every topic, so the error is that of a topic.
            in_cluster(CREATE),
            name="by the cluster",
        ),
    ),
    "DeleteTopics": (row(5, topics.DeleteTopicsRequest(topic_names=["deleted"]), topic(DELETE, "deleted")),),
    "DeleteRecords": (
        row(
            2,
            offsets.DeleteRecordsRequest(
                topics=[
                    offsets.DeleteRecordsTopic(
                        name="cut", partitions=[offsets.DeleteRecordsPartition(partition_index=0, offset=-1)]
                    )
                ],
                timeout_ms=1000,
            ),
            topic(DELETE, "cut"),
        ),
    ),
    "InitProducerId": (
        row(4, produce.InitProducerIdRequest(transactional_id=None), in_cluster(Operation.IDEMPOTENT_WRITE)),
        row(
            4,
            produce.InitProducerIdRequest(transactional_id="new", transaction_timeout_ms=1000),
            transactional(WRITE, "new"),
            name="of a transaction",
        ),
    ),
    "OffsetForLeaderEpoch": (
        row(
            4,
            offsets.OffsetForLeaderEpochRequest(
                replica_id=-1,
                topics=[
                    offsets.OffsetForLeaderTopic(
                        topic="t", partitions=[offsets.OffsetForLeaderPartition(partition=0, leader_epoch=0)]
                    )
                ],
            ),
            topic(DESCRIBE),
        ),
    ),
    "AddPartitionsToTxn": (
        with_producer(
            3,
            lambda producer_id, epoch: transactions.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id="added",
                v3_and_below_producer_id=producer_id,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=[transactions.AddPartitionsToTxnTopic(name="t", partitions=[0])],
            ),
            transactional(WRITE, "added"),
            topic(WRITE),
            of="added",
        ),
    ),
    "AddOffsetsToTxn": (
        with_producer(
            3,
            lambda producer_id, epoch: transactions.AddOffsetsToTxnRequest(
                transactional_id="offsets", producer_id=producer_id, producer_epoch=epoch, group_id="g"
            ),
            transactional(WRITE, "offsets"),
            group(READ),
            of="offsets",
        ),
    ),
    "TxnOffsetCommit": (
        with_producer(
            3,
            commit_in_transaction,
            transactional(WRITE, "offsets"),
            group(READ),
            topic(READ),
            of="offsets",
            told=None,
        ),
    ),
    "EndTxn": (
        with_producer(
            4,
            lambda producer_id, epoch: transactions.EndTxnRequest(
                transactional_id="added", producer_id=producer_id, producer_epoch=epoch, committed=False
            ),
            transactional(WRITE, "added"),
            of="added",
            told=None,
        ),
    ),
    "WriteTxnMarkers": (
        row(1, markers(), in_cluster(Operation.CLUSTER_ACTION), told=None),
        row(1, markers(), in_cluster(ALTER), told=None, name="by an operator"),
    ),
    "DescribeAcls": (
        row(
            2,
            security.DescribeAclsRequest(
                resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
            ),
            in_cluster(DESCRIBE),
            told=None,
        ),
    ),
    "CreateAcls": (
        row(
            2,
            security.CreateAclsRequest(
                creations=[
                    security.AclCreation(
                        resource_type=2,
                        resource_name="t",
                        principal="User:x",
                        host="*",
                        operation=3,
                        permission_type=3,
                    )
                ]
            ),
            in_cluster(ALTER),
            told=None,
        ),
    ),
    "DeleteAcls": (
        row(
            2,
            security.DeleteAclsRequest(
                filters=[
                    security.DeleteAclsFilter(
                        resource_type_filter=2,
                        resource_name_filter="nothing",
                        principal_filter=None,
                        host_filter=None,
                        operation=1,
                        permission_type=1,
                    )
                ]
            ),
            in_cluster(ALTER),
            told=None,
        ),
    ),
    "DescribeConfigs": (
        row(4, describe_configs(2, "t"), topic(DESCRIBE_CONFIGS)),
        row(4, describe_configs(4, "1"), in_cluster(DESCRIBE_CONFIGS), name="of a broker"),
        row(4, describe_configs(32, "g"), group(DESCRIBE_CONFIGS), told=None, name="of a group"),
    ),
    "AlterConfigs": (
        row(2, replace_configs(2, "altered", "retention.ms"), topic(ALTER_CONFIGS, "altered")),
        row(2, replace_configs(4, "1", "log.retention.ms"), in_cluster(ALTER_CONFIGS), name="of a broker"),
    ),
    "IncrementalAlterConfigs": (
        row(1, alter(2, "altered", "segment.ms"), topic(ALTER_CONFIGS, "altered")),
        row(1, alter(4, "1", "log.roll.ms"), in_cluster(ALTER_CONFIGS), name="of a broker"),
        row(1, alter(32, "g", "x"), group(ALTER_CONFIGS), told=None, name="of a group"),
    ),
    "DescribeLogDirs": (row(4, placement.DescribeLogDirsRequest(topics=None), in_cluster(DESCRIBE)),),
    "SaslAuthenticate": (row(1, security.SaslAuthenticateRequest(auth_bytes=b""), told=None),),
    "CreatePartitions": (
        row(
            3,
            topics.CreatePartitionsRequest(
                topics=[topics.CreatePartitionsTopic(name="grown", count=2, assignments=None)]
            ),
            topic(ALTER, "grown"),
        ),
    ),
    "DeleteGroups": (row(2, groups.DeleteGroupsRequest(groups_names=["deleted"]), group(DELETE, "deleted")),),
    "ElectLeaders": (row(2, placement.ElectLeadersRequest(topic_partitions=None), in_cluster(ALTER)),),
    "AlterPartitionReassignments": (
        row(
            0,
            placement.AlterPartitionReassignmentsRequest(
                topics=[
                    placement.ReassignableTopic(
                        name="t",
                        partitions=[placement.ReassignablePartition(partition_index=0, replicas=[7])],
                    )
                ]
            ),
            in_cluster(ALTER),
            told=ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
    ),
    "ListPartitionReassignments": (
        row(0, placement.ListPartitionReassignmentsRequest(topics=None), in_cluster(DESCRIBE)),
    ),
    "OffsetDelete": (
        row(
            0,
            groups.OffsetDeleteRequest(
                group_id="cut",
                topics=[
                    groups.OffsetDeleteRequestTopic(
                        name="t", partitions=[groups.OffsetDeleteRequestPartition(partition_index=0)]
                    )
                ],
            ),
            group(DELETE, "cut"),
            topic(READ),
        ),
    ),
    "DescribeClientQuotas": (
        row(0, quotas.DescribeClientQuotasRequest(), in_cluster(DESCRIBE_CONFIGS), told=None),
    ),
    "AlterClientQuotas": (
        row(
            0,
            quotas.AlterClientQuotasRequest(
                entries=[
                    quotas.QuotaAlteration(
                        entity=[metadata_records.QuotaEntityPart(entity_type="user", entity_name="u")],
                        ops=[quotas.QuotaOp(key="producer_byte_rate", value=1e6)],
                    )
                ]
            ),
            in_cluster(ALTER_CONFIGS),
            told=None,
        ),
    ),
    "DescribeUserScramCredentials": (
        row(0, security.DescribeUserScramCredentialsRequest(users=None), in_cluster(DESCRIBE), told=None),
    ),
    "AlterUserScramCredentials": (
        row(
            0,
            security.AlterUserScramCredentialsRequest(
                deletions=[security.ScramCredentialDeletion(name="nobody", mechanism=1)]
            ),
            in_cluster(ALTER),
            told=None,
        ),
    ),
    "DescribeQuorum": (
        row(
            1,
            quorum.DescribeQuorumRequest(
                topics=[
                    quorum.DescribeQuorumRequestTopic(
                        topic_name="__cluster_metadata",
                        partitions=[quorum.DescribeQuorumRequestPartition(partition_index=0)],
                    )
                ]
            ),
            in_cluster(DESCRIBE),
        ),
    ),
    "UpdateFeatures": (
        row(
            1,
            cluster.UpdateFeaturesRequest(
                feature_updates=[cluster.FeatureUpdateKey(feature="penstock.compaction", max_version_level=1)]
            ),
            in_cluster(ALTER),
            told=None,
        ),
    ),
    "DescribeCluster": (row(1, cluster.DescribeClusterRequest()),),
    "DescribeProducers": (
        row(
            0,
            transactions.DescribeProducersRequest(
                topics=[transactions.DescribeProducersRequestTopic(name="t", partition_indexes=[0])]
            ),
            topic(READ),
        ),
    ),
    "UnregisterBroker": (
        row(
            0,
            brokers.UnregisterBrokerRequest(broker_id=7),
            in_cluster(ALTER),
            told=ErrorCode.BROKER_ID_NOT_REGISTERED,
        ),
    ),
    "DescribeTransactions": (
        row(
            0,
            transactions.DescribeTransactionsRequest(transactional_ids=["x"]),
            transactional(DESCRIBE),
        ),
    ),
    "ListTransactions": (
        row(
            0,
            transactions.ListTransactionsRequest(),
            transactional(DESCRIBE),
            hides=lambda response: not response.transaction_states,
        ),
    ),
    "ConsumerGroupHeartbeat": (
        row(
            0,
            consumer_groups.ConsumerGroupHeartbeatRequest(group_id="g", subscribed_topic_names=["t"]),
            group(READ),
            topic(DESCRIBE),
            told=ErrorCode.UNSUPPORTED_VERSION,
        ),
    ),
    "ListConfigResources": (row(1, configs.ListConfigResourcesRequest(), in_cluster(DESCRIBE_CONFIGS)),),
    "DescribeTopicPartitions": (
        row(
            0,
            topics.DescribeTopicPartitionsRequest(topics=[topics.TopicRequest(name="t")]),
            topic(DESCRIBE),
        ),
        row(
            0,
            topics.DescribeTopicPartitionsRequest(),
            topic(DESCRIBE),
            hides=lambda response: not response.topics,
            name="of all topics",
        ),
    ),
    "AddRaftVoter": (row(0, quorum.AddRaftVoterRequest(voter_id=7), in_cluster(ALTER), told=None),),
    "RemoveRaftVoter": (row(0, quorum.RemoveRaftVoterRequest(voter_id=7), in_cluster(ALTER), told=None),),
}
