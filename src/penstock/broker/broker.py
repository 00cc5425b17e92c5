"""One node: its storage, its metadata, its partitions and its coordinators, put together.

Handlers get the Broker and reach everything through it. It holds no state of its own beyond caches of
answers, which are dropped whenever the committed image moves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from penstock.broker.config import BrokerConfig, TopicConfig
from penstock.broker.connection import WAITING, Call, Encoded
from penstock.broker.consensus import Consensus
from penstock.broker.coordinators import Coordinators
from penstock.broker.housekeeping import Housekeeping
from penstock.broker.logs import Logger
from penstock.broker.options import ServeOptions
from penstock.broker.partitions import HostedPartition, Partitions
from penstock.broker.sessions import FetchSessions
from penstock.broker.storage import METADATA_DIRECTORY, Storage
from penstock.decision import Decision
from penstock.environment import Environment
from penstock.metadata.controller import Controller
from penstock.metadata.controller import ProducerIds as AllocatedIds
from penstock.metadata.image import BrokerImage, Delta, Endpoint, Image
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.model import BrokerId, TopicId, parse_id
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.schema import Message

# Kafka's number for a listener without TLS and SASL.
PLAINTEXT = 0
CREATE_TOPICS_VERSION = 7
# With more logs to close, asking the kernel for everything at once is several times faster.
SYNCED_ONE_BY_ONE_MAX = 32


class Broker:
    def __init__(
        self,
        environment: Environment,
        options: ServeOptions,
        config: BrokerConfig,
        logger: Logger,
        *,
        on_failure: Callable[[str], None],
    ) -> None:
        self.environment = environment
        self.config = config
        self.logger = logger
        self.node_id = BrokerId(options.node_id)
        self._rack = options.rack
        # Of this run's registration.
        self.broker_epoch = -1
        # Answers in bytes, by what was asked; valid for the current image.
        self.encoded_api_versions: dict[int, Encoded] = {}
        self.encoded_metadata: dict[tuple[int, bool, bool], Encoded] = {}

        self.storage = Storage(environment, options.data_dirs[0], options.node_id, logger, on_failure)
        self.cluster_id = self.storage.cluster_id
        self.partitions = Partitions(self.storage, self._topic_config)
        self.consensus = Consensus(
            environment,
            os.path.join(self.storage.path, METADATA_DIRECTORY),
            lost_page_cache=self.storage.lost_page_cache,
            on_committed=self._committed,
            on_failure=on_failure,
        )
        self.controller = self._controller()
        self.producer_ids = ProducerIds(self)
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, environment.clock, environment.random
        )
        self.coordinators = Coordinators(self)
        self._start()
        self.housekeeping = Housekeeping(environment, config, self.storage, self.partitions, logger)

    @property
    def image(self) -> Image:
        """Committed state: what clients may be told."""
        return self.consensus.image

    def brokers(self) -> Iterable[BrokerImage]:
        return self.image.brokers.values()

    def topic_name(self, topic_id: bytes) -> str:
        """Empty when no topic has this id."""
        topic = self.image.topics_by_id.get(TopicId(topic_id))
        return "" if topic is None else topic.name

    def decide(self, request: Message, call: Call) -> Any:
        """Let the controller handle a request, and answer it when the decision is committed."""
        decision = self.controller.handle(request, call.version, self.environment.clock.wall_ms())
        self.propose(decision, call.answer, lambda: call.answer(_void(decision.response)))
        return WAITING

    def propose(
        self, decision: Decision[Message], answer: Callable[[Any], None], refused: Callable[[], None]
    ) -> None:
        """``answer(response)`` once the decision is committed; ``refused()`` when the disk has no room for it."""
        if not self.consensus.propose(decision, answer):
            self.logger.error("the disk is full: a change of the metadata was refused")
            self.controller = self._controller()
            refused()

    def create_topics(self, names: list[str], done: Callable[[dict[str, int]], None]) -> None:
        """Create topics because somebody asked for them, with the broker's defaults."""
        topics = [CreatableTopic(name=name, num_partitions=-1, replication_factor=-1) for name in names]
        decision = self.controller.handle(
            CreateTopicsRequest(topics=topics), CREATE_TOPICS_VERSION, self.environment.clock.wall_ms()
        )
        self.propose(
            decision,
            lambda response: done({topic.name: topic.error_code for topic in response.topics}),
            lambda: done(dict.fromkeys(names, ErrorCode.KAFKA_STORAGE_ERROR)),
        )

    def create_offsets_topic(self, done: Callable[[int], None]) -> None:
        decision = self.controller.create_internal_topic(
            CONSUMER_OFFSETS,
            self.config.offsets_topic_num_partitions,
            self.config.offsets_topic_replication_factor,
            {"cleanup.policy": "compact", "segment.bytes": str(self.config.offsets_topic_segment_bytes)},
            self.environment.clock.wall_ms(),
        )
        self.propose(
            decision,
            lambda result: done(result.error_code),
            lambda: done(ErrorCode.COORDINATOR_NOT_AVAILABLE),
        )

    def announce(self, host: str, port: int) -> None:
        """Write down that this node serves at this address from now on."""
        self.consensus.propose_now(self.controller.found_cluster())
        registered: BrokerImage = self.consensus.propose_now(
            self.controller.register_broker(
                self.node_id,
                incarnation_id=self.environment.random.randbytes(16),
                endpoints=[Endpoint("PLAINTEXT", host, port, PLAINTEXT)],
                rack=self._rack,
                directories=[parse_id(self.storage.directory_id)],
                lost_page_cache=self.storage.lost_page_cache,
            )
        )
        self.broker_epoch = registered.epoch

    def close(self) -> None:
        """Flush and close every log, and say so: the next start need not look inside."""
        hosted_logs = [hosted for hosted in self.partitions if hosted.is_open]
        for hosted in hosted_logs:
            hosted.log.seal()
        if len(hosted_logs) > SYNCED_ONE_BY_ONE_MAX:
            self.environment.files.sync_everything()
        for hosted in hosted_logs:
            hosted.log.close()
        self.storage.prepare_checkpoint(self.partitions)()
        self.consensus.close()
        self.storage.leave_clean_marker(self.broker_epoch)

    def _controller(self) -> Controller:
        return Controller(
            self.consensus.decided_image(),
            random=self.environment.random,
            broker=self.node_id,
            static=self.config.static,
        )

    def _start(self) -> None:
        """Host what the image says, and look at every log the last run did not close."""
        image = self.image
        self._committed(image, Delta(created=tuple(image.topics)))
        self.storage.quarantine_strays(image)
        if not self.storage.was_clean:
            for name in self.storage.partitions_on_disk():
                hosted = self.partitions.get(name.topic, name.partition)
                if hosted is not None:
                    self._recover(hosted)
        self.coordinators.load()

    def _recover(self, hosted: HostedPartition) -> None:
        try:
            _ = hosted.log
        except OSError as error:
            # The others can be served; whoever asks for this one gets a storage error.
            self.logger.error("cannot open", partition=repr(hosted), error=str(error))

    def _committed(self, image: Image, delta: Delta) -> None:
        self.encoded_metadata.clear()
        self.partitions.apply(image, delta)
        if delta.deleted:
            self.coordinators.topics_deleted([topic.name for topic in delta.deleted])

    def _topic_config(self, image: Image, name: str) -> TopicConfig:
        return self.config.topic_config(image, self.node_id, name)


class ProducerIds:
    """Hands out producer ids from blocks that the controller has given this broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._next = 0
        # Exclusive.
        self._end = 0

    def next(self, done: Callable[[int], None], refused: Callable[[], None]) -> None:
        """``done(producer id)``, or ``refused()`` when there is no room on the disk for a new block."""
        if self._next < self._end:
            self._next += 1
            done(self._next - 1)
            return

        def allocated(block: AllocatedIds | ErrorCode) -> None:
            assert not isinstance(block, ErrorCode), "this broker is registered"
            # Another request may have brought a block meanwhile; the ids left of it are skipped, never
            # reused.
            self._next, self._end = block.first, block.first + block.count
            self.next(done, refused)

        broker = self._broker
        decision = broker.controller.allocate_producer_ids(broker.node_id, broker.broker_epoch)
        broker.propose(decision, allocated, refused)


def _void(response: Any) -> Any:
    """An answer to a request of which nothing came about, because the disk is full."""
    for results in ("topics", "responses", "results"):
        for result in getattr(response, results, ()):
            if not result.error_code:
                result.error_code = ErrorCode.KAFKA_STORAGE_ERROR
                result.error_message = "The broker's disk is full."
    return response
