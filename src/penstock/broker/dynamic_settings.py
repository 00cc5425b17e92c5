"""Applies the broker settings that can change at runtime to the parts that use them.

Topic settings are not here: ``BrokerConfig.topic_config`` has them, and partitions take them from the image.
"""

from __future__ import annotations

from penstock.broker.config import BrokerConfig
from penstock.broker.network.connection_limits import ConnectionLimits
from penstock.broker.partition.hosted_partitions import Partitions
from penstock.broker.replication.replication import Replication
from penstock.metadata.configs import broker_value, layers_of
from penstock.metadata.image import Image
from penstock.metadata.settings import LONG_MAX

# Limits what a reassignment copies to this broker.
THROTTLE = "follower.replication.throttled.rate"


class DynamicSettings:
    def __init__(
        self,
        config: BrokerConfig,
        limits: ConnectionLimits,
        partitions: Partitions,
        replication: Replication,
        *,
        node_id: int,
    ) -> None:
        self._config = config
        self._limits = limits
        self._partitions = partitions
        self._replication = replication
        self._node_id = node_id

    def apply(self, image: Image) -> None:
        layers = layers_of(image, self._node_id, self._config.static)
        fetchers = self._replication.fetchers
        rate: int = broker_value(THROTTLE, layers)
        fetchers.set_throttle(None if rate == LONG_MAX else rate)
        self._limits.total = broker_value("max.connections", layers)
        self._limits.per_address = broker_value("max.connections.per.ip", layers)
        if fetchers.set_fetchers_per_leader(broker_value("num.replica.fetchers", layers)):
            self._replication.following.follow_all(list(self._partitions))
