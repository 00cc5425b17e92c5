"""Creation of topics and partitions: validation, placement, and the resulting changes.

A ``Creation`` lives for one request and collects the changes of everything the request is granted. Names and
limits include what the request has been granted so far, so one request can neither create two topics with
colliding names nor exceed the number of partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random

from penstock.metadata.alterations import check_topic_settings, difference
from penstock.metadata.configs import Layers, broker_value, default_replication_factor, topic_entries
from penstock.metadata.image import (
    TOPIC_RESOURCE,
    ConfigResource,
    Image,
    PartitionImage,
    TopicImage,
    config_record,
    partition_record,
)
from penstock.metadata.placement import Candidate, TooFewBrokers, place, turn_order
from penstock.metadata.refusal import Refusal
from penstock.metadata.topic_settings import CREATED
from penstock.metadata.topics import (
    CLUSTER_METADATA,
    CLUSTER_METADATA_ID,
    collision_key,
    is_internal,
    name_error,
)
from penstock.metadata.values import UNASSIGNED_DIRECTORY
from penstock.model import NO_TOPIC_ID, BrokerId, TopicId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.metadata_records import TopicRecord
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreatePartitionsTopic,
)
from penstock.protocol.schema import Message

# Kafka allows as many records per request. They become one batch of the metadata log.
PARTITIONS_PER_REQUEST_MAX = 10_000
# Twice the cluster size we design for.
PARTITIONS_MAX = 200_000


class Creation:
    def __init__(
        self,
        image: Image,
        *,
        names: Mapping[str, str],
        random: Random,
        layers: Layers,
        wall_ms: int,
        brokers_expected: int = 1,
        full: Collection[BrokerId] = (),
    ) -> None:
        """``names`` maps collision keys to topic names; ``full`` are brokers without disk space."""
        self.changes: list[Message] = []
        self._image = image
        self._names = names
        self._random = random
        self._layers = layers
        self._wall_ms = wall_ms
        self._brokers_expected = brokers_expected
        self._full = full
        # Topics granted to this request so far, by collision key.
        self._new_names: dict[str, str] = {}
        self._new_partitions = 0
        # Settings for responses, shared by topics with the same settings.
        self._shown: dict[frozenset[tuple[str, str]], list[CreatableTopicConfigs]] = {}

    def topic(self, asked: CreatableTopic, *, is_own: bool = False) -> CreatableTopicResult:
        """Create a topic for a client, or (``is_own``) for a broker itself. Raises Refusal."""
        if is_own and is_internal(asked.name):
            settings = _given_settings(asked)
            return self.internal_topic(asked.name, asked.num_partitions, asked.replication_factor, settings)
        self._check_name(asked.name)
        settings = _given_settings(asked)
        check_topic_settings(settings, self._image, internal=False)
        return self._create(asked.name, self._asked_replicas(asked), settings)

    def internal_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str]
    ) -> CreatableTopicResult:
        """Create an internal topic, which may have more settings. Raises Refusal."""
        assert is_internal(name)
        if name in self._image.topics:
            raise Refusal(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' is there already.")
        if name == CLUSTER_METADATA:
            raise Refusal(ErrorCode.INVALID_TOPIC_EXCEPTION, f"'{name}' is the name of the metadata log.")
        check_topic_settings(settings, self._image, internal=True)
        return self._create(name, self._wanted_replicas(partitions, replication_factor), settings)

    def partitions(self, asked: CreatePartitionsTopic) -> None:
        """Add partitions to a topic for a client. Raises Refusal."""
        topic = self._image.topics.get(asked.name)
        if topic is None:
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic '{asked.name[:249]}'.")
        if is_internal(topic.name):
            # Group ids hash to its partitions.
            raise Refusal(ErrorCode.INVALID_REQUEST, f"'{topic.name}' is an internal topic.")
        count = len(topic.partitions)
        if asked.count <= count:
            raise Refusal(
                ErrorCode.INVALID_PARTITIONS,
                f"Topic '{topic.name}' has {count} partitions; {asked.count} would not be more.",
            )
        added = asked.count - count
        first = topic.partitions[0]
        # During a reassignment it has both the old and the new replicas.
        replication_factor = len(first.replicas) - len(first.removing_replicas)
        if asked.assignments is None:
            replicas = self._placed(added, replication_factor, self._start_of(topic), count)
        else:
            if len(asked.assignments) != added:
                raise Refusal(
                    ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                    f"{added} partitions are added, but {len(asked.assignments)} are assigned.",
                )
            self._check_limits(added)
            replicas = [
                self._checked(count + number, assignment.broker_ids, replication_factor)
                for number, assignment in enumerate(asked.assignments)
            ]
        self._new_partitions += added
        self.changes += [
            partition_record(topic.id, self._partition(count + number, brokers))
            for number, brokers in enumerate(replicas)
        ]

    def shown_settings(self, settings: Mapping[str, str]) -> list[CreatableTopicConfigs]:
        """All settings of a topic with these settings of its own, for the response."""
        key = frozenset(settings.items())
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = [
                CreatableTopicConfigs(
                    name=entry.setting.name,
                    value=entry.value,
                    read_only=entry.is_read_only,
                    config_source=entry.source,
                )
                for entry in topic_entries(settings, self._layers)
            ]
        return shown

    # Checking.

    def _check_name(self, name: str) -> None:
        reason = name_error(name)
        if reason is not None:
            raise Refusal(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        if name in self._image.topics:
            raise Refusal(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{name}' is there already.")
        if is_internal(name):
            raise Refusal(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"'{name}' is an internal topic; the broker creates it when needed.",
            )
        key = collision_key(name)
        other = self._names.get(key) or self._new_names.get(key)
        if other is not None:
            raise Refusal(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"Topic '{name}' collides with '{other}', because '.' and '_' count as the same.",
            )

    def _check_limits(self, partitions: int) -> None:
        if self._new_partitions + partitions > PARTITIONS_PER_REQUEST_MAX:
            raise Refusal(
                ErrorCode.POLICY_VIOLATION,
                f"A request can create {PARTITIONS_PER_REQUEST_MAX} partitions at most.",
            )
        if self._image.partition_count + self._new_partitions + partitions > PARTITIONS_MAX:
            raise Refusal(
                ErrorCode.POLICY_VIOLATION,
                f"The cluster can have {PARTITIONS_MAX} partitions; it has {self._image.partition_count}.",
            )

    # Placing.

    def _asked_replicas(self, asked: CreatableTopic) -> list[tuple[BrokerId, ...]]:
        """The replicas of each partition of a new topic, placed by us or by the client."""
        if asked.assignments:
            return self._assigned(asked)
        return self._wanted_replicas(asked.num_partitions, asked.replication_factor)

    def _wanted_replicas(self, partitions: int, replication_factor: int) -> list[tuple[BrokerId, ...]]:
        """Place this number of partitions and replicas; -1 stands for the default."""
        if replication_factor < -1 or replication_factor == 0:
            raise Refusal(
                ErrorCode.INVALID_REPLICATION_FACTOR, "The replication factor must be positive, or -1."
            )
        if partitions < -1 or partitions == 0:
            raise Refusal(ErrorCode.INVALID_PARTITIONS, "The number of partitions must be positive, or -1.")
        if partitions == -1:
            partitions = broker_value("num.partitions", self._layers)
        if replication_factor == -1:
            # Brokers that are still starting count too: a topic must not have one replica for ever because it was
            # created while its cluster was starting.
            brokers = max(len(self._image.brokers), self._brokers_expected)
            replication_factor = default_replication_factor(self._layers, brokers)
        return self._placed(partitions, replication_factor, self._random_start())

    def _assigned(self, asked: CreatableTopic) -> list[tuple[BrokerId, ...]]:
        if asked.num_partitions != -1 or asked.replication_factor != -1:
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                "With replicas assigned, the number of partitions and the replication factor must be -1.",
            )
        self._check_limits(len(asked.assignments))
        by_index = {assignment.partition_index: assignment.broker_ids for assignment in asked.assignments}
        if len(by_index) != len(asked.assignments) or by_index.keys() != set(range(len(by_index))):
            raise Refusal(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                "Partitions must be assigned once each, numbered from 0 without gaps.",
            )
        replication_factor = len(by_index[0])
        return [self._checked(index, by_index[index], replication_factor) for index in range(len(by_index))]

    def _checked(
        self, index: int, broker_ids: Sequence[int], replication_factor: int
    ) -> tuple[BrokerId, ...]:
        """The replicas that a client has assigned to a partition. Raises Refusal."""
        brokers = tuple(map(BrokerId, broker_ids))
        reason = None
        if not brokers:
            reason = "no replicas"
        elif len(set(brokers)) != len(brokers):
            reason = "one broker twice"
        elif len(brokers) != replication_factor:
            reason = f"{len(brokers)} replicas, but the other partitions have {replication_factor}"
        elif unknown := set(brokers) - self._image.brokers.keys():
            reason = f"broker {min(unknown)}, which is not registered"
        elif not any(self._image.brokers[broker].is_active for broker in brokers):
            reason = "only brokers that are fenced or shutting down"
        if reason is not None:
            raise Refusal(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"Partition {index} is assigned {reason}.")
        return brokers

    def _placed(
        self, partitions: int, replication_factor: int, start: int, first: int = 0
    ) -> list[tuple[BrokerId, ...]]:
        self._check_limits(partitions)
        try:
            return place(self._candidates(), partitions, replication_factor, start, first)
        except TooFewBrokers as error:
            raise Refusal(ErrorCode.INVALID_REPLICATION_FACTOR, f"{error}.") from None

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(broker.id, broker.rack, broker.is_active and broker.id not in self._full)
            for broker in self._image.brokers.values()
        ]

    def _random_start(self) -> int:
        # Up to the square, because the second round places followers differently from the first.
        return self._random.randrange(max(1, len(self._image.brokers) ** 2))

    def _start_of(self, topic: TopicImage) -> int:
        """The start of the round that placed the last partition of a topic."""
        order = turn_order(candidate for candidate in self._candidates() if candidate.is_active)
        last = topic.partitions[-1]
        if last.replicas[0] not in order:
            return self._random_start()
        return (order.index(last.replicas[0]) - last.index) % len(order)

    # Making.

    def _create(
        self, name: str, replicas: Sequence[tuple[BrokerId, ...]], settings: Mapping[str, str]
    ) -> CreatableTopicResult:
        id = self._new_id()
        resource = ConfigResource(TOPIC_RESOURCE, name)
        self._new_names[collision_key(name)] = name
        self._new_partitions += len(replicas)
        self.changes += [
            TopicRecord(name=name, topic_id=id),
            config_record(resource, CREATED, str(self._wall_ms)),
            *difference(resource, {}, settings),
        ]
        self.changes += [
            partition_record(id, self._partition(index, brokers)) for index, brokers in enumerate(replicas)
        ]
        return CreatableTopicResult(
            name=name,
            topic_id=id,
            error_message=None,
            num_partitions=len(replicas),
            replication_factor=len(replicas[0]),
        )

    def _partition(self, index: int, replicas: tuple[BrokerId, ...]) -> PartitionImage:
        brokers = self._image.brokers
        active = tuple(broker for broker in replicas if brokers[broker].is_active)
        isr = tuple(broker for broker in active if broker not in self._full) or active
        directories = (brokers[broker].directories for broker in replicas)
        return PartitionImage(
            index,
            leader=isr[0],
            leader_epoch=0,
            partition_epoch=0,
            replicas=replicas,
            isr=isr,
            # A broker with several directories chooses one itself.
            directories=tuple(known[0] if len(known) == 1 else UNASSIGNED_DIRECTORY for known in directories),
        )

    def _new_id(self) -> TopicId:
        while True:
            id = bytearray(self._random.randbytes(16))
            # A random UUID (RFC 9562), as in Kafka.
            id[6] = id[6] & 0x0F | 0x40
            id[8] = id[8] & 0x3F | 0x80
            topic_id = TopicId(bytes(id))
            # Kafka avoids ids that print with a leading dash, which commands would parse as an option.
            if id[0] >> 2 != 62 and topic_id not in self._image.topics_by_id:
                assert topic_id not in (NO_TOPIC_ID, CLUSTER_METADATA_ID)
                return topic_id


def _given_settings(asked: CreatableTopic) -> dict[str, str]:
    settings: dict[str, str] = {}
    for config in asked.configs:
        if config.value is None:
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{config.name[:80]} has no value.")
        if config.name in settings:
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{config.name[:80]} is set twice.")
        settings[config.name] = config.value
    return settings
