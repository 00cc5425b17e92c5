"""Checkers that look inside the nodes.

``Inspector.look`` checks every running node several times a second: images at the same offset are equal, the
metadata logs agree as far as they are committed, a leader epoch has one leader, a quorum epoch has one
controller, no node serves without a lease, high watermarks and log starts only rise. ``final`` compares the
copies of every partition byte by byte. The numbers are those of the project's invariants; ``client_checkers.py``
checks what clients see.
"""

from __future__ import annotations

from itertools import pairwise

from penstock.environment import FileRange
from penstock.log.log import Log
from penstock.metadata.image import Image, PartitionImage
from penstock.metadata.values import BrokerImage
from penstock.protocol.records import BatchHeader, batches
from penstock.sim.client import Place
from penstock.sim.client_checkers import LEASE_MS, LEASE_SLACK_MS
from penstock.sim.cluster import Cluster, Machine
from penstock.sim.disk import Content
from penstock.sim.node import RunningNode
from penstock.sim.report import Violation
from penstock.sim.topics import COMPACTED, Topics

READ_BYTES = 1 << 20


class EqualImages:
    """22: the image at an offset is the same on every node and after every restart."""

    def __init__(self) -> None:
        self._images: dict[int, tuple[Image, str]] = {}
        self.compared = 0

    def saw(self, image: Image, by: str) -> None:
        known, first = self._images.setdefault(image.offset, (image, by))
        if known is not image:
            self.compared += 1
            if known != image:
                raise Violation(f"the image at offset {image.offset} differs between {first} and {by}")


class OneHistory:
    """21, 22: the committed part of the metadata log is the same on every node and after every restart.

    The files are read directly from the simulated disk: a read through the node could change what it does next.
    """

    def __init__(self) -> None:
        # By base offset: (next offset, epoch, checksum), and the first node that had it.
        self._batches: dict[int, tuple[tuple[int, int, int], str]] = {}
        # For each start of a node: how far it was read (committed, file, position in it).
        self._read: dict[tuple[str, int], tuple[int, str, int]] = {}
        self.compared = 0

    def saw(self, machine: Machine, segments: list[str], committed: int) -> None:
        """Check a node's metadata log in these files, which is committed up to this offset."""
        key = (machine.host, machine.starts)
        before, path, position = self._read.get(key, (0, "", 0))
        if committed <= before:
            return
        if path in segments:
            segments = segments[segments.index(path) :]
        for path in segments:
            content = machine.disk.find(path)
            assert isinstance(content, Content)
            start = position if path == self._read.get(key, (0, "", 0))[1] else 0
            end = start
            for at, header in batches(bytes(content.data[start:])):
                if header.next_offset > committed:
                    break
                self._saw_batch(header, machine.host)
                end = start + at + header.size
            position = end
            self._read[key] = (committed, path, position)

    def _saw_batch(self, header: BatchHeader, by: str) -> None:
        batch = (header.next_offset, header.leader_epoch, header.crc)
        known, first = self._batches.setdefault(header.base_offset, (batch, by))
        self.compared += first != by
        if known != batch:
            raise Violation(
                f"metadata histories part: at offset {header.base_offset} (next, epoch, crc) is {known} on {first} "
                f"and {batch} on {by}"
            )


class LeasesEnd:
    """6: a broker that serves clients has a lease from the controller, and was not fenced before that."""

    def __init__(self) -> None:
        # By (broker, broker epoch): when it was first seen fenced.
        self._fenced_ms: dict[tuple[int, int], float] = {}
        # By broker: when it was last seen inactive. A broker may be unfenced for less than the time between two
        # looks; then a fence from before it became active says nothing about its lease.
        self._inactive_ms: dict[int, float] = {}
        # By (start of a node, broker): the broker in the last image seen there.
        self._brokers: dict[tuple[str, int], BrokerImage] = {}

    def saw(self, image: Image, by: str, now_ms: float) -> None:
        """A node's image. A broker that is fenced as before, but is another object, was unfenced in between."""
        for broker in image.brokers.values():
            before = self._brokers.get((by, broker.id))
            self._brokers[by, broker.id] = broker
            key = (broker.id, broker.epoch)
            if before is not broker and before == broker and key in self._fenced_ms:
                self._fenced_ms[key] = now_ms

    def images_say(self, newest: Image, now_ms: float) -> None:
        fenced = {(broker.id, broker.epoch) for broker in newest.brokers.values() if broker.fenced}
        self._fenced_ms = {key: self._fenced_ms.get(key, now_ms) for key in sorted(fenced)}

    def is_inactive(self, node_id: int, now_ms: float) -> None:
        self._inactive_ms[node_id] = now_ms

    def serves(self, node_id: int, epoch: int, silence_ms: float, now_ms: float) -> None:
        limit_ms = LEASE_MS + LEASE_SLACK_MS
        if silence_ms > limit_ms:
            raise Violation(
                f"node {node_id} serves without a lease: the controller last answered {silence_ms} ms ago"
            )
        fenced_ms = self._fenced_ms.get((node_id, epoch))
        if fenced_ms is None:
            return
        since_ms = max(fenced_ms, self._inactive_ms.get(node_id, 0))
        if now_ms > since_ms + limit_ms:
            raise Violation(f"node {node_id} serves without a lease: fenced {now_ms - since_ms:.0f} ms ago")


class OneLeader:
    """17: each leader epoch of a partition has one leader, and epochs only rise."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[bytes, int, int], tuple[int, str]] = {}
        # For each node, the last epochs it had.
        self._epochs: dict[tuple[str, bytes, int], tuple[int, int]] = {}
        self.elections = 0

    def saw(self, topic_id: bytes, partition: PartitionImage, by: str) -> None:
        key = (topic_id, partition.index, partition.leader_epoch)
        if key not in self._leaders:
            self.elections += 1
        leader, first = self._leaders.setdefault(key, (partition.leader, by))
        if leader != partition.leader:
            raise Violation(
                f"two leaders of {topic_id.hex()}-{partition.index} in epoch {partition.leader_epoch}: {leader} "
                f"according to {first}, {partition.leader} according to {by}"
            )
        now = (partition.leader_epoch, partition.partition_epoch)
        before = self._epochs.get((by, topic_id, partition.index), (-1, -1))
        if now < before:
            raise Violation(f"epochs of {topic_id.hex()}-{partition.index} fell on {by}: {before} to {now}")
        self._epochs[(by, topic_id, partition.index)] = now


class OneController:
    """17, 21: each quorum epoch has one active controller."""

    def __init__(self) -> None:
        self._controllers: dict[int, str] = {}

    def saw(self, epoch: int, by: str) -> None:
        controller = self._controllers.setdefault(epoch, by)
        if controller != by:
            raise Violation(f"two controllers in quorum epoch {epoch}: {controller} and {by}")

    @property
    def count(self) -> int:
        return len(self._controllers)


class RisingWatermarks:
    """19: a leader's high watermark only rises, and never exceeds its log end."""

    def __init__(self) -> None:
        self._watermarks: dict[tuple[str, int, bytes, int, int], int] = {}

    def saw(
        self, machine: Machine, topic_id: bytes, partition: int, epoch: int, high_watermark: int, end: int
    ) -> None:
        key = (machine.host, machine.starts, topic_id, partition, epoch)
        before = self._watermarks.get(key, 0)
        if high_watermark < before:
            raise Violation(
                f"the high watermark of {topic_id.hex()}-{partition} fell from {before} to {high_watermark} on "
                f"its leader {machine.host} in epoch {epoch}"
            )
        if high_watermark > end:
            raise Violation(
                f"the high watermark {high_watermark} of {topic_id.hex()}-{partition} on {machine.host} is beyond "
                f"its end {end}"
            )
        self._watermarks[key] = high_watermark


class RisingStarts:
    """25: the log start of a leader only rises in one epoch."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, int, bytes, int, int], int] = {}

    def saw(self, machine: Machine, topic_id: bytes, partition: int, epoch: int, start: int) -> None:
        key = (machine.host, machine.starts, topic_id, partition, epoch)
        before = self._starts.get(key, 0)
        if start < before:
            raise Violation(
                f"the log of {topic_id.hex()}-{partition} on its leader {machine.host} began at {before} and now "
                f"begins at {start}, in epoch {epoch}"
            )
        self._starts[key] = start


class CompleteLeaders:
    """18: a leader has everything that was committed before."""

    def __init__(self) -> None:
        # The highest high watermark of any leader, and its epoch.
        self._committed: dict[tuple[bytes, int], tuple[int, int]] = {}

    def saw(
        self, machine: Machine, topic_id: bytes, partition: int, epoch: int, high_watermark: int, end: int
    ) -> None:
        committed, of_epoch = self._committed.get((topic_id, partition), (0, -1))
        # A leader of an older epoch may not know yet that it no longer leads.
        if epoch >= of_epoch and end < committed:
            raise Violation(
                f"{machine.host} leads {topic_id.hex()}-{partition} in epoch {epoch} and ends at {end}; "
                f"{committed} was committed in epoch {of_epoch}"
            )
        if high_watermark > committed:
            self._committed[(topic_id, partition)] = (high_watermark, epoch)


class Inspector:
    def __init__(self, cluster: Cluster, topics: Topics) -> None:
        self._cluster = cluster
        self._topics = topics
        self._images = EqualImages()
        self._history = OneHistory()
        self._leases = LeasesEnd()
        self._starts = RisingStarts()
        self._leaders = OneLeader()
        self._controllers = OneController()
        self._watermarks = RisingWatermarks()
        self._complete = CompleteLeaders()
        # Partitions that clients know of, and that must exist at the end.
        self._expected: dict[Place, None] = {}
        self._checked: dict[str, Image] = {}
        self._bytes_compared = 0
        # How often a connection was seen that is over a quota.
        self.delayed = 0

    @property
    def compared(self) -> int:
        return self._images.compared + self._bytes_compared

    @property
    def metadata_compared(self) -> int:
        """Metadata batches that were compared with those of another node."""
        return self._history.compared

    @property
    def elections(self) -> int:
        return self._leaders.elections + self._controllers.count

    def expect(self, place: Place) -> None:
        self._expected[place] = None

    def places(self) -> list[Place]:
        return [place for place in self._expected if place.topic_id not in self._topics.deleting]

    # During the run

    def look(self) -> None:
        now_ms = self._cluster.loop.now_ms
        ready = [
            (machine, machine.node)
            for machine in self._cluster.running
            if machine.node is not None and machine.node.is_ready
        ]
        for machine in self._cluster.running:
            if machine.node is None or not machine.node.is_active:
                self._leases.is_inactive(machine.node_id, now_ms)
        for machine, node in ready:
            self._leases.saw(node.image, f"{machine.host}/{machine.starts}", now_ms)
        if ready:
            newest = max((node.image for _, node in ready), key=lambda image: image.offset)
            self._leases.images_say(newest, now_ms)
        for machine, node in ready:
            image = node.image
            self._history.saw(machine, node.metadata_segments, node.metadata_committed)
            if node.serving_epoch is not None:
                self._leases.serves(node.node_id, node.serving_epoch, node.silence_ms, now_ms)
            if self._checked.get(machine.host) is not image:
                self._checked[machine.host] = image
                image.check()
                self._images.saw(image, machine.host)
                for topic in image.topics.values():
                    for partition in topic.partitions:
                        self._leaders.saw(topic.id, partition, machine.host)
            if node.is_controller:
                self._controllers.saw(node.quorum_epoch, machine.host)
            for hosted in node.led():
                self._starts.saw(
                    machine, hosted.topic_id, hosted.index, hosted.leader_epoch, hosted.log.log_start_offset
                )
                for checker in (self._watermarks, self._complete):
                    checker.saw(
                        machine,
                        hosted.topic_id,
                        hosted.index,
                        hosted.leader_epoch,
                        hosted.high_watermark,
                        hosted.log.log_end_offset,
                    )
            node.check()
            self.delayed += node.delayed

    # At the end

    def what_is_missing(self) -> str:
        """What is not in order; empty when every node runs and every partition has a leader and a full ISR."""
        nodes: list[RunningNode] = []
        for machine in self._cluster.machines.values():
            if not machine.is_running or machine.node is None or not machine.node.is_ready:
                return f"{machine.host} is not running ({machine.failure or 'not ready'})"
            nodes.append(machine.node)
        newest = max(nodes, key=lambda each: each.image.offset).image
        for place in self.places():
            topic = newest.topics.get(place.topic)
            if topic is None or topic.id != place.topic_id or place.partition >= len(topic.partitions):
                return f"{place} is not in the newest image"
        for each in nodes:
            for topic in each.image.topics.values():
                for partition in topic.partitions:
                    name = f"{topic.name}-{partition.index}"
                    if partition.leader < 0:
                        return f"{name} has no leader, says {each.node_id}"
                    if sorted(partition.isr) != sorted(partition.replicas):
                        return (
                            f"{name} has {partition.isr} of {partition.replicas} in sync, says {each.node_id}"
                        )
        return ""

    def is_whole(self) -> bool:
        return not self.what_is_missing()

    def is_sound(self) -> bool:
        """Whether any one machine could lose its disk now.

        The cluster is whole, all voters vote, and leaders agree with their images, which they may be ahead of.
        """
        if not self.is_whole():
            return False
        for machine in self._cluster.machines.values():
            assert machine.node is not None
            if machine.node_id in self._cluster.voters and not machine.node.is_voter:
                return False
            for hosted in machine.node.led():
                if sorted(hosted.replication.isr) != sorted(hosted.image.replicas):
                    return False
        return True

    def ends(self) -> dict[Place, int]:
        """The end of each partition's committed records, according to its leader."""
        ends = {}
        for place in self.places():
            for machine in self._cluster.running:
                if machine.node is None:
                    continue
                for hosted in machine.node.led():
                    if hosted.topic_id == place.topic_id and hosted.index == place.partition:
                        ends[place] = hosted.high_watermark
        return ends

    def final(self) -> None:
        """16: copies are equal byte by byte, as far as both are committed.

        Not those of compacted topics, of which each replica cleans its own (``compaction_log_checkers.py``).
        """
        for place in self.places():
            if place.topic in COMPACTED:
                continue
            copies: list[tuple[Machine, Log, int]] = []
            for machine in self._cluster.running:
                if machine.node is None:
                    continue
                hosted = machine.node.hosted(place.topic, place.partition)
                if hosted is not None and hosted.topic_id == place.topic_id:
                    if not machine.is_harmed:
                        hosted.log.check()
                    copies.append((machine, hosted.log, hosted.high_watermark))
            for (one, log, watermark), (other, other_log, other_watermark) in pairwise(copies):
                start = max(log.log_start_offset, other_log.log_start_offset)
                end = min(watermark, other_watermark)
                if one.is_harmed or other.is_harmed or start >= end:
                    continue
                data, other_data = read_all(log, start, end), read_all(other_log, start, end)
                self._bytes_compared += 1
                if data != other_data:
                    at = next(
                        (at for at, (a, b) in enumerate(zip(data, other_data)) if a != b),
                        min(len(data), len(other_data)),
                    )
                    raise Violation(
                        f"the copies of {place} on {one.host} and {other.host} differ from byte {at} on, "
                        f"between offsets {start} and {end}"
                    )


def read_all(log: Log, start: int, end: int) -> bytes:
    """The batches between two offsets, which must be batch boundaries."""
    data = b""
    at = start
    while at < end:
        found = log.read(at, READ_BYTES, end, at_least_one=True)
        if found is None:
            break
        assert isinstance(found, FileRange)
        piece = found.file.read_at(found.position, found.size)
        data += piece
        at = _next_offset(piece)
    return data


def _next_offset(data: bytes) -> int:
    last = -1
    for _, header in batches(data):
        last = header.next_offset
    return last
