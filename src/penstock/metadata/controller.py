"""The controller: decides about topics, partitions, settings, brokers and producer ids.

It never writes and never sends. ``handle`` looks at its image, returns the changes to append to the metadata
log and the answer that may leave once they are committed, and has already applied the changes to its own
image, so that two requests in flight see each other ("decide ahead"). Readers are served from another image,
that of committed changes. When changes cannot be committed, the controller is thrown away and a new one is
made from the committed image.

What a newcomer gets wrong: everything random comes from the generator given to the constructor, so that a run
can be repeated; and the limits below are not politeness but what keeps one request from taking all memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from penstock.decision import Decision
from penstock.metadata.alterations import alter_configs, incremental_alter_configs
from penstock.metadata.changes import METADATA_VERSION, METADATA_VERSION_LEVEL
from penstock.metadata.configs import broker_value, layers_of
from penstock.metadata.creation import Creation
from penstock.metadata.image import BrokerImage, Endpoint, Image, TopicImage, registration_record
from penstock.metadata.refusal import Refusal
from penstock.metadata.topics import collision_key, is_internal
from penstock.model import NO_TOPIC_ID, BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import AlterConfigsRequest, IncrementalAlterConfigsRequest
from penstock.protocol.messages.metadata_records import (
    FeatureLevelRecord,
    PartitionChangeRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
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

# As many as Kafka gives a broker at once.
PRODUCER_IDS = 1000
_LONG_MAX = 2**63 - 1

# CreateTopics answers with the settings of the new topics since this version (KIP-525).
_SETTINGS_VERSION = 5
# DeleteTopics has an error of its own for deletion being switched off since this version.
_DISABLED_VERSION = 3


class ProducerIds(NamedTuple):
    """A block of producer ids that no other broker has."""

    first: int
    count: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody misses here


class Controller:
    def __init__(self, image: Image, *, random: Random, broker: int, static: Mapping[str, str]) -> None:
        """``broker`` is the node that this runs on, and ``static`` are the settings it was started with."""
        # What was decided, be it committed or not.
        self.image = image
        self._random = random
        self._broker = broker
        self._static = static
        # The name of each topic by its collision key.
        self._names = {collision_key(name): name for name in image.topics}

    def handle(self, request: Message, version: int, wall_ms: int) -> Decision[Message]:
        match request:
            case CreateTopicsRequest():
                made = self._create_topics(request, version, wall_ms)
                return self._decided(*made, validate_only=request.validate_only)
            case DeleteTopicsRequest():
                return self._decided(*self._delete_topics(request, version))
            case CreatePartitionsRequest():
                added = self._create_partitions(request, wall_ms)
                return self._decided(*added, validate_only=request.validate_only)
            case AlterConfigsRequest():
                return self._decided(*alter_configs(request, self.image), validate_only=request.validate_only)
            case IncrementalAlterConfigsRequest():
                altered = incremental_alter_configs(request, self.image)
                return self._decided(*altered, validate_only=request.validate_only)
            case _:
                raise AssertionError(f"{type(request).__name__} is not for the controller")

    def apply(self, changes: Iterable[Message]) -> None:
        """Take over changes that were not decided here, as when replaying the log."""
        self.image, delta = self.image.apply(changes)
        for topic in delta.deleted:
            self._names.pop(collision_key(topic.name), None)
        for name in delta.created:
            self._names[collision_key(name)] = name

    def found_cluster(self) -> Decision[Message]:
        """What a metadata log begins with; nothing when it has begun."""
        if METADATA_VERSION in self.image.features:
            return Decision()
        return self._decided(
            [FeatureLevelRecord(name=METADATA_VERSION, feature_level=METADATA_VERSION_LEVEL)]
        )

    def register_broker(
        self,
        broker: int,
        *,
        incarnation_id: bytes,
        endpoints: Sequence[Endpoint],
        rack: str | None,
        directories: Sequence[bytes],
        lost_page_cache: bool = False,
    ) -> Decision[Message]:
        """Register a broker that has started; the response is its BrokerImage.

        That no other process runs under its id is for the caller to know. When the page cache was lost,
        records that clients have read may be missing and their offsets be given out again. The broker's
        partitions then get a new leader epoch, which is how clients find out (KIP-320).
        """
        known = self.image.brokers.get(BrokerId(broker))
        if known is not None and known.incarnation_id == incarnation_id:
            return Decision(response=known)
        registered = BrokerImage(
            BrokerId(broker),
            # The offset of the registration, as in Kafka.
            self.image.offset + 1,
            incarnation_id,
            tuple(endpoints),
            rack,
            fenced=False,
            in_controlled_shutdown=False,
            directories=tuple(directories),
        )
        assert known is None or known.epoch < registered.epoch
        changes: list[Message] = [registration_record(registered)]
        if lost_page_cache:
            changes += [
                PartitionChangeRecord(partition_id=partition.index, topic_id=topic.id, leader=broker)
                for topic in self.image.topics.values()
                for partition in topic.partitions
                if partition.leader == broker
            ]
        return self._decided(changes, registered)

    def allocate_producer_ids(self, broker: int, broker_epoch: int) -> Decision[Message]:
        """Give a broker a block of producer ids; the response is ProducerIds, or an ErrorCode."""
        known = self.image.brokers.get(BrokerId(broker))
        if known is None:
            return Decision(response=ErrorCode.BROKER_ID_NOT_REGISTERED)
        if known.epoch != broker_epoch:
            return Decision(response=ErrorCode.STALE_BROKER_EPOCH)
        first = self.image.next_producer_id
        if first > _LONG_MAX - PRODUCER_IDS:
            return Decision(response=ErrorCode.UNKNOWN_SERVER_ERROR)
        change = ProducerIdsRecord(
            broker_id=broker, broker_epoch=broker_epoch, next_producer_id=first + PRODUCER_IDS
        )
        return self._decided([change], ProducerIds(first, PRODUCER_IDS))

    def create_internal_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str], wall_ms: int
    ) -> Decision[Message]:
        """Create one of the broker's own topics; the response is a CreatableTopicResult."""
        creation = self._creation(wall_ms)
        try:
            result = creation.internal_topic(name, partitions, replication_factor, settings)
        except Refusal as refusal:
            result = CreatableTopicResult(name=name, error_code=refusal.error, error_message=refusal.message)
        return self._decided(creation.changes, result)

    def _decided(
        self, changes: Sequence[Message], response: object = None, *, validate_only: bool = False
    ) -> Decision[Message]:
        if validate_only:
            return Decision(response=response)
        if changes:
            self.apply(changes)
        return Decision(list(changes), response)

    def _create_topics(
        self, request: CreateTopicsRequest, version: int, wall_ms: int
    ) -> tuple[Sequence[Message], CreateTopicsResponse]:
        creation = self._creation(wall_ms)
        times = Counter(topic.name for topic in request.topics)
        results: dict[str, CreatableTopicResult] = {}
        for topic in request.topics:
            if topic.name in results:
                continue
            try:
                if times[topic.name] > 1:
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each topic may be named once.")
                result = creation.topic(topic)
                if version >= _SETTINGS_VERSION:
                    result.configs = creation.shown_settings(
                        {config.name: config.value or "" for config in topic.configs}
                    )
            except Refusal as refusal:
                result = CreatableTopicResult(
                    name=topic.name, error_code=refusal.error, error_message=refusal.message
                )
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
            names=self._names,
            random=self._random,
            layers=layers_of(self.image, self._broker, self._static),
            wall_ms=wall_ms,
        )

    def _delete_topics(
        self, request: DeleteTopicsRequest, version: int
    ) -> tuple[Sequence[Message], DeleteTopicsResponse]:
        # By name, or by id since version 6.
        asked: list[tuple[str | None, TopicId]] = [(name, NO_TOPIC_ID) for name in request.topic_names]
        asked += [(topic.name, TopicId(topic.topic_id)) for topic in request.topics]
        found = {key: self._topic(*key) for key in asked}
        times_asked = Counter(asked)
        times_found = Counter(topic.id for topic in found.values() if topic is not None)
        is_enabled = broker_value("delete.topic.enable", layers_of(self.image, self._broker, self._static))
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
                        "Deleting topics is switched off (delete.topic.enable).",
                    )
                if (name is None) == (id == NO_TOPIC_ID):
                    raise Refusal(ErrorCode.INVALID_REQUEST, "A topic is named either by name or by id.")
                if times_asked[name, id] > 1 or (topic is not None and times_found[topic.id] > 1):
                    raise Refusal(ErrorCode.INVALID_REQUEST, "Each topic may be named once.")
                changes.append(_deletion(name, topic))
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
        raise Refusal(ErrorCode.INVALID_REQUEST, f"'{topic.name}' is one of the broker's own topics.")
    return RemoveTopicRecord(topic_id=topic.id)
