"""Group coordinators: the kind of coordinator that is stored in ``__consumer_offsets``."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from penstock.broker.config import BrokerConfig
from penstock.broker.coordination.coordinator_kind import CoordinatorKind
from penstock.groups import changes
from penstock.groups.coordinator import Coordinator
from penstock.metadata.image import Image
from penstock.metadata.topics import CONSUMER_OFFSETS
from penstock.protocol.messages.topics import CreatableTopic, CreatableTopicConfig


def group_coordinators(config: BrokerConfig, random: Random) -> CoordinatorKind[Coordinator]:
    def new_topic() -> CreatableTopic:
        return CreatableTopic(
            name=CONSUMER_OFFSETS,
            num_partitions=config.offsets_topic_num_partitions,
            # Default: as many as other topics have.
            replication_factor=(
                config.offsets_topic_replication_factor
                if "offsets.topic.replication.factor" in config.static
                else -1
            ),
            configs=[
                CreatableTopicConfig(name="cleanup.policy", value="compact"),
                CreatableTopicConfig(name="segment.bytes", value=str(config.offsets_topic_segment_bytes)),
            ],
        )

    def make_core(image: Callable[[], Image]) -> Coordinator:
        def topic_id(name: str) -> bytes | None:
            topic = image().topics.get(name)
            return None if topic is None else topic.id

        return Coordinator(config.groups, random, topic_id)

    return CoordinatorKind(
        topic=CONSUMER_OFFSETS,
        new_topic=new_topic,
        make_core=make_core,
        encode=changes.encode,
        decode=changes.decode,
        in_transactions=lambda core: core,
    )
