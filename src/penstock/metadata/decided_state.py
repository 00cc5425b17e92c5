"""The decided state, including changes that are not committed yet: every decision of the controller starts from it.

The parts of the controller (brokers, ISRs, reassignments, ...) share one ``DecidedState``. A part looks at the
image and the partition index, and hands its changes to ``take``, which applies them at once: the next step of
the same decision sees them, and so does the next request. ``drain`` ends the decision.
``take`` is not a proposal: what was taken goes into the log, or the whole controller is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.metadata.configs import Layers, broker_value, layers_of, topic_value
from penstock.metadata.elections import Election, Revision, Standing
from penstock.metadata.image import BROKER_RESOURCE, Image, PartitionImage, TopicImage
from penstock.metadata.partition_index import Key, PartitionIndex
from penstock.metadata.topic_settings import MIN_ISR
from penstock.metadata.topics import collision_key
from penstock.metadata.values import UNASSIGNED_DIRECTORY, BrokerImage
from penstock.model import BrokerId
from penstock.protocol.schema import Message

# The most that one request may change.
CHANGES_MAX = 10_000
# Changes per decision that the controller makes on its own: a batch of the metadata log is written, sent and
# applied as a whole, and everything else waits for it. About 30 ms.
PORTION = 500

UNCLEAN = "unclean.leader.election.enable"


class DecidedState:
    # Replaced only in the simulator, by planted bugs.
    revision_type: type[Revision] = Revision

    def __init__(self, image: Image, *, broker: int, static: Mapping[str, str]) -> None:
        """``broker`` is the node that this runs on, and ``static`` are the settings it was started with."""
        self.image = image
        self.partition_index = PartitionIndex(image)
        # The name of each topic by its collision key.
        self.names = {collision_key(name): name for name in image.topics}
        self.broker = BrokerId(broker)
        self.static = static
        # Full directories by broker, as reported in heartbeats. Not in the log.
        self.full: dict[BrokerId, frozenset[bytes]] = {}
        # Changes of the current decision.
        self._changes: list[Message] = []
        # Caches: effective value by the topic's own text; None for topics without one.
        self._min_isrs: dict[str | None, int] = {}
        self._uncleans: dict[str | None, bool] = {}

    def take(self, changes: Sequence[Message]) -> None:
        """Decide these changes, in this order and without others in between."""
        if changes:
            self._changes += changes
            self.apply(changes)

    def drain(self) -> list[Message]:
        """End the current decision and return its changes."""
        changes = self._changes
        self._changes = []
        return changes

    def apply(self, changes: Iterable[Message]) -> None:
        """Apply changes that were not decided here, as when replaying the log."""
        before = self.image
        self.image, delta = before.apply(changes)
        self.partition_index.follow(before, self.image, delta)
        for topic in delta.deleted:
            self.names.pop(collision_key(topic.name), None)
        for name in delta.created:
            self.names[collision_key(name)] = name
        if any([resource.type == BROKER_RESOURCE for resource in delta.configs_changed]):
            self._min_isrs.clear()
            self._uncleans.clear()

    def check(self) -> None:
        self.image.check()
        self.partition_index.check(self.image)
        assert self.names == {collision_key(name): name for name in self.image.topics}
        assert not self._changes, "a decision was left open"

    # Settings.

    def layers(self) -> Layers:
        return layers_of(self.image, self.broker, self.static)

    def setting(self, name: str) -> Any:
        return broker_value(name, self.layers())

    def min_isr(self, topic: str) -> int:
        """The setting as it is; a partition with fewer replicas needs no more than it has."""
        overrides = self.image.topic_config(topic)
        text = overrides.get(MIN_ISR)
        known = self._min_isrs.get(text)
        if known is None:
            known = self._min_isrs[text] = topic_value(MIN_ISR, overrides, self.layers())
        return known

    def isr_needed(self, topic: TopicImage, partition: PartitionImage) -> int:
        """How many replicas must be in sync to commit anything."""
        return max(1, min(self.min_isr(topic.name), len(partition.replicas)))

    def election_of(self, topic: str) -> Election:
        """The kind of election that a topic's settings allow."""
        overrides = self.image.topic_config(topic)
        text = overrides.get(UNCLEAN)
        known = self._uncleans.get(text)
        if known is None:
            known = self._uncleans[text] = topic_value(UNCLEAN, overrides, self.layers())
        return Election.UNCLEAN if known else Election.IF_NEEDED

    # Brokers and partitions.

    def is_active(self, broker: int) -> bool:
        known = self.image.brokers.get(BrokerId(broker))
        return known is not None and known.is_active

    def standing_of(self, broker: BrokerId, directory: bytes) -> Standing:
        """The standing of a replica in this directory of a broker."""
        known = self.image.brokers.get(broker)
        if known is None or known.fenced or not known.has(directory):
            return Standing.GONE
        if known.in_controlled_shutdown:
            return Standing.STOPPING
        return Standing.FULL if self.full and self.is_full(known, directory) else Standing.ACTIVE

    def is_full(self, known: BrokerImage, directory: bytes) -> bool:
        """Whether a replica in this directory of a broker cannot be written to."""
        full = self.full.get(known.id)
        # A replica without a directory will go where there is space.
        return full is not None and (directory in full or full.issuperset(known.directories))

    def full_brokers(self) -> list[BrokerId]:
        """Brokers whose directories are all full; empty if that is true of every active broker."""
        brokers = self.image.brokers
        full = [id for id in self.full if id in brokers and self.is_full(brokers[id], UNASSIGNED_DIRECTORY)]
        has_other = any([broker.is_active and broker.id not in full for broker in brokers.values()])
        return full if has_other else []

    def directory_for(self, broker: BrokerId) -> bytes:
        """The directory of a new replica on a broker; a broker with several directories chooses one itself."""
        directories = self.image.brokers[broker].directories
        return directories[0] if len(directories) == 1 else UNASSIGNED_DIRECTORY

    def find(self, key: Key) -> tuple[TopicImage, PartitionImage]:
        topic = self.image.topics_by_id[key[0]]
        return topic, topic.partitions[key[1]]

    def revision(self, topic: TopicImage, partition: PartitionImage) -> Revision:
        """Start a change of a partition, with the kind of election that its topic allows."""
        revision = self.revision_type(topic.id, partition, self.min_isr(topic.name), self.standing_of)
        revision.election = self.election_of(topic.name)
        return revision
