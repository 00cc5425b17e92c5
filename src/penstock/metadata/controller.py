"""The controller: decides about topics, partitions, settings, brokers and producer ids.

This file dispatches requests and handles topics, settings and producer ids. Brokers and their sessions are in
``broker_registry.py``, ISR proposals in ``isr.py``, reassignments by administrators in ``reassignment.py``,
automatic moves in ``rebalancing.py``, elections in ``elections.py``, feature levels in ``features.py``, users in
``users.py`` and ACLs in ``acls.py``.

The controller never writes and never sends. ``handle`` looks at its image and returns the changes to append to
the metadata log, with the response to send once they are committed. It has then already applied the changes to
its own image, so that two requests in flight see each other ("decide ahead"). Readers are served from another
image, that of committed changes. When changes cannot be committed, the controller is thrown away and a new one is
made from the committed image.

All randomness comes from the generator given to the constructor, so that a run can be repeated. The limits below
keep one request from using all memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from penstock.decision import Decision
from penstock.metadata.acls import create_acls, delete_acls
from penstock.metadata.alterations import alter_configs, incremental_alter_configs
from penstock.metadata.auto_creation import AutoCreation
from penstock.metadata.broker_registry import BrokerRegistry
from penstock.metadata.changes import METADATA_VERSION, METADATA_VERSION_LEVEL
from penstock.metadata.creation import Creation
from penstock.metadata.decided_state import UNCLEAN, DecidedState
from penstock.metadata.features import SECURITY, SECURITY_LEVEL, raise_levels, update_features
from penstock.metadata.first_users import Credentials
from penstock.metadata.image import (
    BROKER_RESOURCE,
    ConfigResource,
    Image,
    TopicImage,
    config_record,
)
from penstock.metadata.isr import alter_partition, assign_replicas_to_dirs, without_outdated_eligible
from penstock.metadata.quotas import alter_client_quotas
from penstock.metadata.reassignment import alter_reassignments, elect_leaders, list_reassignments
from penstock.metadata.rebalancing import Rebalancing
from penstock.metadata.refusal import Refusal
from penstock.metadata.security import credential_record
from penstock.metadata.topics import is_internal
from penstock.metadata.users import alter_credentials
from penstock.metadata.values import CLUSTER_ID, NO_LEADER
from penstock.model import NO_TOPIC_ID, BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.brokers import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterPartitionRequest,
    AlterPartitionResponse,
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    BrokerHeartbeatRequest,
    BrokerRegistrationRequest,
    UnregisterBrokerRequest,
)
from penstock.protocol.messages.cluster import UpdateFeaturesRequest
from penstock.protocol.messages.configs import AlterConfigsRequest, IncrementalAlterConfigsRequest
from penstock.protocol.messages.metadata_records import (
    ConfigRecord,
    FeatureLevelRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
)
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
)
from penstock.protocol.messages.quotas import AlterClientQuotasRequest
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
)
from penstock.protocol.messages.topics import (
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from penstock.protocol.schema import Message

# The block size of Kafka.
PRODUCER_IDS = 1000
_LONG_MAX = 2**63 - 1

# CreateTopics responses have contained the settings of new topics since this version (KIP-525).
_SETTINGS_VERSION = 5
# DeleteTopics has had its own error code for disabled deletion since this version.
_DISABLED_VERSION = 3


class ProducerIds(NamedTuple):
    """A block of producer ids, allocated to one broker only."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here


class Controller:
    def __init__(
        self,
        image: Image,
        *,
        random: Random,
        broker: int,
        static: Mapping[str, str],
        brokers_expected: int = 1,
    ) -> None:
        """``broker`` is the node that this runs on, and ``static`` are the settings it was started with.

        ``brokers_expected`` is how many brokers the cluster is known to have, registered or not.
        """
        self._decided = DecidedState(image, broker=broker, static=static)
        self._random = random
        self._brokers_expected = brokers_expected
        self._brokers = BrokerRegistry(self._decided)
        self._rebalancing = Rebalancing(self._decided, self._brokers)
        self._auto_creation = AutoCreation()

    @property
    def image(self) -> Image:
        """The decided state, including changes that are not committed yet."""
        return self._decided.image

    def took_over(self, now_ms: int) -> None:
        """Begin to watch the brokers, each with a fresh session."""
        self._brokers.took_over(now_ms)
        self._rebalancing.took_over(now_ms)

    def was_asleep(self, now_ms: int) -> None:
        """The node was suspended: missing heartbeats say nothing about the brokers."""
        self._brokers.renew(now_ms)

    def handle(
        self,
        request: Message,
        version: int,
        wall_ms: int,
        now_ms: int = 0,
        *,
        from_host: str | None = None,
        from_broker: bool = False,
    ) -> Decision[Message]:
        """Decide about a request.

        ``from_host`` replaces a missing host in an endpoint. ``from_broker`` marks a broker's own request, not
        one of a client: it may create internal topics.
        """
        decided = self._decided
        match request:
            case BrokerHeartbeatRequest():
                return self._complete(self._brokers.heartbeat(request, now_ms, wall_ms))
            case AlterPartitionRequest():
                return self._complete(self._alter_partition(request, version))
            case CreateTopicsRequest():
                made = self._create_topics(request, version, wall_ms, now_ms, from_broker)
                return self._decide(*made, validate_only=request.validate_only)
            case DeleteTopicsRequest():
                return self._decide(*self._delete_topics(request, version, now_ms))
            case CreatePartitionsRequest():
                added = self._create_partitions(request, wall_ms)
                return self._decide(*added, validate_only=request.validate_only)
            case AlterConfigsRequest():
                return self._alter_configs(*alter_configs(request, self.image), request.validate_only)
            case IncrementalAlterConfigsRequest():
                altered = incremental_alter_configs(request, self.image)
                return self._alter_configs(*altered, request.validate_only)
            case BrokerRegistrationRequest():
                return self._complete(self._brokers.register(request, now_ms, from_host))
            case UnregisterBrokerRequest():
                self._rebalancing.has_unregistered = True
                return self._complete(self._brokers.unregister(request, now_ms))
            case AllocateProducerIdsRequest():
                return self._allocate_producer_ids(request)
            case AssignReplicasToDirsRequest():
                return self._complete(self._assign_replicas(request))
            case AlterPartitionReassignmentsRequest():
                return self._complete(alter_reassignments(decided, request))
            case ListPartitionReassignmentsRequest():
                return self._complete(list_reassignments(decided, request))
            case ElectLeadersRequest():
                return self._complete(elect_leaders(decided, request))
            case AlterClientQuotasRequest():
                quotas = alter_client_quotas(request, self.image)
                return self._decide(*quotas, validate_only=request.validate_only)
            case UpdateFeaturesRequest():
                return self._complete(update_features(decided, request, version))
            case AlterUserScramCredentialsRequest():
                return self._complete(alter_credentials(decided, request))
            case CreateAclsRequest():
                return self._complete(create_acls(decided, request, self._random))
            case DeleteAclsRequest():
                return self._complete(delete_acls(decided, request))
            case _:
                raise AssertionError(f"{type(request).__name__} is not for the controller")

    def tick(self, now_ms: int, wall_ms: int) -> Decision[Message]:
        """Make the decisions that are due by time, or for which the last decision had no room."""
        self._brokers.tick(now_ms)
        self._rebalancing.tick(now_ms)
        # Also if the last controller has registered all brokers, but was replaced before this was committed.
        raise_levels(self._decided)
        return self._complete()

    def next_deadline_ms(self, now_ms: int) -> int | None:
        """The time at which ``tick`` has work next; None when only a request can bring some."""
        deadlines = (self._brokers.next_deadline_ms(now_ms), self._rebalancing.next_deadline_ms())
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def broker_lost(self, broker: int, epoch: int, now_ms: int) -> Decision[Message]:
        """Fence a broker at once: it closed its connection and refused a new one. Epoch -1 matches any."""
        self._brokers.lost(BrokerId(broker), epoch, now_ms)
        return self._complete()

    def apply(self, changes: Iterable[Message]) -> None:
        """Apply changes that were not decided here, as when replaying the log."""
        self._decided.apply(changes)

    def check(self) -> None:
        """Assert the invariants between two decisions (invariants 17 to 20 as far as the metadata goes)."""
        self._decided.check()
        self._brokers.check()
        self._auto_creation.check()
        brokers = self.image.brokers
        for topic in self.image.topics.values():
            for partition in topic.partitions:
                assert not partition.last_known_elr or partition.leader == NO_LEADER, partition
                assert len(partition.last_known_elr) <= 1, partition
                # The leader commits nothing while there are eligible leader replicas.
                assert (
                    not partition.eligible_leader_replicas
                    or len(partition.isr) < self._decided.isr_needed(topic, partition)
                    or self._brokers.has_to_review
                ), (topic.name, partition)
                for member in partition.isr:
                    known = brokers.get(member)
                    assert known is not None, (topic.name, partition)
                    assert (
                        not known.fenced
                        or member in self._brokers.to_evict
                        or partition.replicas == (member,)
                    ), (topic.name, partition)

    def found_cluster(
        self, cluster_id: str = "", first_users: Credentials | None = None
    ) -> Decision[Message]:
        """The first changes of a metadata log; none when the log already has them.

        With ``first_users``, every broker of the new cluster must know their records: one that does not is not
        registered.
        """
        changes: list[Message] = []
        if METADATA_VERSION not in self.image.features:
            changes.append(FeatureLevelRecord(name=METADATA_VERSION, feature_level=METADATA_VERSION_LEVEL))
            if first_users:
                changes.append(FeatureLevelRecord(name=SECURITY, feature_level=SECURITY_LEVEL))
            for (user, mechanism), credential in (first_users or {}).items():
                changes.append(credential_record(user, mechanism, credential))
        # Also added to the log of an older release, which kept the cluster id elsewhere.
        if cluster_id and not self.image.cluster_id:
            changes.append(config_record(ConfigResource(BROKER_RESOURCE, ""), CLUSTER_ID, cluster_id))
        return self._decide(changes)

    def allocate_producer_ids(self, broker: int, broker_epoch: int) -> Decision[Message]:
        """Allocate a block of producer ids; the response is ProducerIds, or an ErrorCode."""
        try:
            self._brokers.check_epoch(broker, broker_epoch)
        except Refusal as refusal:
            return Decision(response=refusal.error)
        first = self.image.next_producer_id
        if first > _LONG_MAX - PRODUCER_IDS:
            return Decision(response=ErrorCode.UNKNOWN_SERVER_ERROR)
        change = ProducerIdsRecord(
            broker_id=broker, broker_epoch=broker_epoch, next_producer_id=first + PRODUCER_IDS
        )
        return self._decide([change], ProducerIds(first, PRODUCER_IDS))

    def create_internal_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str], wall_ms: int
    ) -> Decision[Message]:
        """Create an internal topic; the response is a CreatableTopicResult."""
        creation = self._creation(wall_ms)
        try:
            result = creation.internal_topic(name, partitions, replication_factor, settings)
        except Refusal as refusal:
            result = CreatableTopicResult(name=name, error_code=refusal.error, error_message=refusal.message)
        return self._decide(creation.changes, result)

    def _decide(
        self, changes: Sequence[Message], response: object = None, *, validate_only: bool = False
    ) -> Decision[Message]:
        if not validate_only:
            self._decided.take(changes)
        return self._complete(response)

    def _complete(self, response: object = None) -> Decision[Message]:
        return Decision(self._decided.drain(), response)

    def _alter_configs(
        self, changes: Sequence[ConfigRecord], response: object, validate_only: bool
    ) -> Decision[Message]:
        if not validate_only:
            self._decided.take(changes)
            self._decided.take(without_outdated_eligible(self._decided, changes))
            if any(change.name == UNCLEAN for change in changes):
                self._brokers.has_to_elect = True
        return self._complete(response)

    def _alter_partition(self, request: AlterPartitionRequest, version: int) -> AlterPartitionResponse:
        try:
            sender = self._brokers.check_epoch(request.broker_id, request.broker_epoch)
        except Refusal:
            # Kafka gives the same error for a broker that is not registered.
            return AlterPartitionResponse(error_code=ErrorCode.STALE_BROKER_EPOCH)
        return alter_partition(self._decided, sender, request, version)

    def _assign_replicas(self, request: AssignReplicasToDirsRequest) -> AssignReplicasToDirsResponse:
        try:
            sender = self._brokers.check_epoch(request.broker_id, request.broker_epoch)
        except Refusal as refusal:
            return AssignReplicasToDirsResponse(error_code=refusal.error)
        return assign_replicas_to_dirs(self._decided, sender, request)

    def _allocate_producer_ids(self, request: AllocateProducerIdsRequest) -> Decision[Message]:
        decision = self.allocate_producer_ids(request.broker_id, request.broker_epoch)
        block = decision.response
        if isinstance(block, ProducerIds):
            decision.response = AllocateProducerIdsResponse(
                producer_id_start=block.first, producer_id_len=block.count
            )
        else:
            decision.response = AllocateProducerIdsResponse(error_code=block)
        return decision

    def _create_topics(
        self, request: CreateTopicsRequest, version: int, wall_ms: int, now_ms: int, from_broker: bool
    ) -> tuple[Sequence[Message], CreateTopicsResponse]:
        creation = self._creation(wall_ms)
        is_wanted = request.connected_for_ms < 0
        names = self._auto_creation
        times = Counter(topic.name for topic in request.topics)
        results: dict[str, CreatableTopicResult] = {}
        for topic in request.topics:
            if topic.name in results:
                continue
            try:
                if not is_wanted and names.is_held(topic.name, request.connected_for_ms, now_ms):
                    raise Refusal(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        f"'{topic.name}' was deleted or refused a moment ago: create it with CreateTopics.",
                    )
                if times[topic.name] > 1:
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each topic may be named once.")
                result = creation.topic(topic, is_own=from_broker)
                if not request.validate_only:
                    names.created(topic.name)
                if version >= _SETTINGS_VERSION:
                    result.configs = creation.shown_settings(
                        {config.name: config.value or "" for config in topic.configs}
                    )
            except Refusal as refusal:
                result = CreatableTopicResult(
                    name=topic.name, error_code=refusal.error, error_message=refusal.message
                )
                if is_wanted and not request.validate_only and topic.name not in self.image.topics:
                    names.refused(topic.name, now_ms)
            results[topic.name] = result
        return creation.changes, CreateTopicsResponse(topics=list(results.values()))

    def _create_partitions(
        self, request: CreatePartitionsRequest, wall_ms: int
    ) -> tuple[Sequence[Message], CreatePartitionsResponse]:
        creation = self._creation(wall_ms)
        times = Counter(topic.name for topic in request.topics)
        results: dict[str, CreatePartitionsTopicResult] = {}
        for topic in request.topics:
            if topic.name in results:
                continue
            result = results[topic.name] = CreatePartitionsTopicResult(name=topic.name)
            try:
                if times[topic.name] > 1:
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each topic may be named once.")
                creation.partitions(topic)
            except Refusal as refusal:
                result.error_code, result.error_message = refusal.error, refusal.message
        return creation.changes, CreatePartitionsResponse(results=list(results.values()))

    def _creation(self, wall_ms: int) -> Creation:
        return Creation(
            self.image,
            names=self._decided.names,
            random=self._random,
            layers=self._decided.layers(),
            wall_ms=wall_ms,
            brokers_expected=self._brokers_expected,
            full=self._decided.full_brokers(),
        )

    def _delete_topics(
        self, request: DeleteTopicsRequest, version: int, now_ms: int
    ) -> tuple[Sequence[Message], DeleteTopicsResponse]:
        # By name, or by id since version 6.
        asked: list[tuple[str | None, TopicId]] = [(name, NO_TOPIC_ID) for name in request.topic_names]
        asked += [(topic.name, TopicId(topic.topic_id)) for topic in request.topics]
        found = {key: self._topic(*key) for key in asked}
        times_asked = Counter(asked)
        times_found = Counter(topic.id for topic in found.values() if topic is not None)
        is_enabled = self._decided.setting("delete.topic.enable")
        changes = []
        results = []
        for (name, id), topic in found.items():
            result = DeletableTopicResult(
                name=name if topic is None else topic.name, topic_id=id if topic is None else topic.id
            )
            try:
                if not is_enabled:
                    raise Refusal(
                        ErrorCode.TOPIC_DELETION_DISABLED
                        if version >= _DISABLED_VERSION
                        else ErrorCode.INVALID_REQUEST,
                        "Deleting topics is disabled (delete.topic.enable=false).",
                    )
                if (name is None) == (id == NO_TOPIC_ID):
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Name each topic by its name or by its id.")
                if times_asked[name, id] > 1 or (topic is not None and times_found[topic.id] > 1):
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each topic may be named once.")
                changes.append(_deletion(name, topic))
                assert topic is not None
                self._auto_creation.deleted(topic.name, now_ms)
            except Refusal as refusal:
                result.error_code, result.error_message = refusal.error, refusal.message
            results.append(result)
        return changes, DeleteTopicsResponse(responses=results)

    def _topic(self, name: str | None, id: TopicId) -> TopicImage | None:
        return self.image.topics_by_id.get(id) if name is None else self.image.topics.get(name)


def _deletion(name: str | None, topic: TopicImage | None) -> RemoveTopicRecord:
    if topic is None:
        error = ErrorCode.UNKNOWN_TOPIC_ID if name is None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        raise Refusal(error, "There is no such topic.")
    if is_internal(topic.name):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"'{topic.name}' is an internal topic.")
    return RemoveTopicRecord(topic_id=topic.id)
