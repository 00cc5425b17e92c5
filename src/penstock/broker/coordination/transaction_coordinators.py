"""Transaction coordinators: the kind of coordinator that is stored in ``__transaction_state``."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.config import BrokerConfig
from penstock.broker.coordination.coordinator_kind import CoordinatorKind
from penstock.metadata.image import Image
from penstock.metadata.topics import TRANSACTION_STATE
from penstock.protocol.messages.topics import CreatableTopic, CreatableTopicConfig
from penstock.transactions import changes
from penstock.transactions.coordinator import TransactionCoordinator


def transaction_coordinators(config: BrokerConfig) -> CoordinatorKind[TransactionCoordinator]:
    def new_topic() -> CreatableTopic:
        configs = {
            "cleanup.policy": "compact",
            "segment.bytes": str(config.transaction_state_log_segment_bytes),
        }
        if "transaction.state.log.min.isr" in config.static:
            configs["min.insync.replicas"] = str(config.transaction_state_log_min_isr)
        return CreatableTopic(
            name=TRANSACTION_STATE,
            num_partitions=config.transaction_state_log_num_partitions,
            # Default: as many as other topics have.
            replication_factor=(
                config.transaction_state_log_replication_factor
                if "transaction.state.log.replication.factor" in config.static
                else -1
            ),
            configs=[CreatableTopicConfig(name=name, value=value) for name, value in configs.items()],
        )

    def make_core(image: Callable[[], Image]) -> TransactionCoordinator:
        return TransactionCoordinator(
            config.transactions, lambda topic, index: image().has_partition(topic, index)
        )

    return CoordinatorKind(
        topic=TRANSACTION_STATE,
        new_topic=new_topic,
        make_core=make_core,
        encode=changes.encode,
        decode=changes.decode,
    )
