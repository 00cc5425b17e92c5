"""A client that creates, changes and deletes topics while the broker dies under it.

It keeps a model of what was acknowledged and looks after every restart whether the broker agrees. An answer
that did not come takes the topic out of the model: it may be either way.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests.chaos.clients import Client
from tests.chaos.errands import is_absence, patiently, settings
from tests.chaos.ledger import Ledger, Place

REQUEST_TIMEOUT_S = 5
TOPICS_MAX = 12
# What a topic is asked to have in common with no other.
SETTING = "retention.ms"


class Topic:
    """What was acknowledged about one."""

    def __init__(self, partitions: int, setting: str) -> None:
        self.partitions = partitions
        self.setting = setting


class Administrator(Client):
    def __init__(self, bootstrap: str, ledger: Ledger, pruned: list[Place], seed: int) -> None:
        super().__init__("administrator", ledger)
        self._random = random.Random(seed)
        self._admin = AdminClient(settings(bootstrap))
        self._consumer = Consumer(settings(bootstrap, group_id="administrator"))
        self._pruned = pruned
        self._low_watermarks = dict.fromkeys(pruned, 0)
        self._topics: dict[str, Topic] = {}
        # Acknowledged as deleted, and not made again.
        self._gone: set[str] = set()
        self._restarts = 0
        self.acknowledged = 0
        self.looks = 0

    def step(self) -> None:
        if self._restarts != self._ledger.restarts:
            self._restarts = self._ledger.restarts
            self.look()
        if not self._topics or self._random.random() < 0.3:
            self._create()
        elif len(self._topics) > TOPICS_MAX:
            self._delete()
        else:
            self._random.choice((self._delete, self._change, self._grow, self._prune, self._prune))()
        self.pause(self._random.uniform(0, 0.05))

    def finish(self) -> None:
        self.look()
        self._consumer.close()

    # What it does

    def _create(self) -> None:
        # Few names, so that most are of topics that were there before and had data in the same directory.
        name = f"shelf-{self._random.randrange(2 * TOPICS_MAX)}"
        if name in self._topics:
            return
        topic = Topic(self._random.randrange(1, 4), self._some_setting())
        self._gone.discard(name)
        future = self._admin.create_topics(
            [NewTopic(name, topic.partitions, 1, config={SETTING: topic.setting})],
            request_timeout=REQUEST_TIMEOUT_S,
        )[name]
        # A topic that exists was made by a request whose answer we did not get: what it is like is not known.
        if self._is_acknowledged(future, KafkaError.TOPIC_ALREADY_EXISTS):
            self._topics[name] = topic

    def _delete(self) -> None:
        name = self._any_topic()
        del self._topics[name]
        future = self._admin.delete_topics([name], request_timeout=REQUEST_TIMEOUT_S)[name]
        if self._is_acknowledged(future, KafkaError.UNKNOWN_TOPIC_OR_PART):
            self._gone.add(name)

    def _change(self) -> None:
        name = self._any_topic()
        topic = self._topics.pop(name)
        topic.setting = self._some_setting()
        entry = ConfigEntry(SETTING, topic.setting, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
        (future,) = self._admin.incremental_alter_configs(
            [resource], request_timeout=REQUEST_TIMEOUT_S
        ).values()
        if self._is_acknowledged(future):
            self._topics[name] = topic

    def _grow(self) -> None:
        name = self._any_topic()
        topic = self._topics.pop(name)
        topic.partitions += 1
        future = self._admin.create_partitions(
            [NewPartitions(name, topic.partitions)], request_timeout=REQUEST_TIMEOUT_S
        )[name]
        if self._is_acknowledged(future, KafkaError.INVALID_PARTITIONS):
            self._topics[name] = topic

    def _prune(self) -> None:
        place = self._random.choice(self._pruned)
        low = self._low_watermarks[place]
        newest = self._ledger.last_acknowledged(place)
        if newest <= low + 1:
            return
        offset = self._random.randrange(low + 1, min(newest, low + 200) + 1)
        self._ledger.asked_to_prune(place, offset)
        (future,) = self._admin.delete_records(
            [TopicPartition(*place, offset)], request_timeout=REQUEST_TIMEOUT_S
        ).values()
        if self._is_acknowledged(future):
            self._low_watermarks[place] = offset

    def _any_topic(self) -> str:
        return self._random.choice(sorted(self._topics))

    def _some_setting(self) -> str:
        return str(self._random.randrange(10**9, 10**12))

    def _is_acknowledged(self, future: Future[Any], *perhaps: int) -> bool:
        """Whether the broker said yes. No answer, or what a repeated request is told, is neither yes nor no."""
        try:
            future.result()
        except KafkaException as error:
            if is_absence(error.args[0]) or error.args[0].code() in perhaps:
                return False
            raise
        self.acknowledged += 1
        return True

    # What it finds

    def look(self) -> None:
        found = patiently(lambda: self._admin.list_topics(timeout=5)).topics
        for name, topic in self._topics.items():
            partitions = len(found[name].partitions) if name in found else 0
            if partitions != topic.partitions:
                self._violate(f"{name} was acknowledged with {topic.partitions} partitions, has {partitions}")
        for name in sorted(self._gone & set(found)):
            self._violate(f"{name} was deleted, and is there")
        self._look_at_settings([name for name in self._topics if name in found])
        for place, low in self._low_watermarks.items():
            partition = TopicPartition(*place)
            start, _ = patiently(partial(self._consumer.get_watermark_offsets, partition, timeout=5))
            if start < low:
                self._violate(f"{place} was pruned to {low}, begins at {start}")
        self.looks += 1

    def _settings_of(self, name: str) -> Any:
        resource = ConfigResource(ResourceType.TOPIC, name)
        asked = self._admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
        return asked[resource].result()

    def _look_at_settings(self, names: list[str]) -> None:
        for name in names:
            entries = patiently(partial(self._settings_of, name))
            if entries[SETTING].value != self._topics[name].setting:
                self._violate(
                    f"{name} was given {SETTING}={self._topics[name].setting}, has {entries[SETTING].value}"
                )

    def _violate(self, what: str) -> None:
        self._ledger.violated(f"{self.name}: {what}")
