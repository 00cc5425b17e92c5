"""The encoded topics of a Metadata response for all topics.

A hundred thousand partitions as message objects would take the loop most of a second. So each topic is encoded
without objects and kept until it changes, and the list is built in pages, a few per turn of the loop. All requests
share the pages until the image changes.

Careful: the bytes of a topic also depend on which brokers are offline, so a change of that encodes all topics
again, and on which brokers lack the listener that the client came in on. While all brokers have the same listeners,
their clients share the pages. The rest of the response (the brokers, the controller) is encoded for each request
(``handlers/topics.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from struct import Struct

from penstock.environment import Spawn
from penstock.metadata.image import NO_LEADER, Delta, Image, TopicImage
from penstock.metadata.topics import is_internal
from penstock.model import BrokerId
from penstock.protocol.errors import ErrorCode
from penstock.protocol.primitives import uvarint

# The versions in which the layout of a topic changed. From 10 on only other parts of the response changed.
# In 6, the error of a leader that lacks the client's listener changed.
LAYOUTS = (0, 1, 5, 6, 7, 8, 9, 10)
# Clients of one cluster use few versions, and brokers lack few listeners. Each edition kept takes about 10 MB for
# 100,000 partitions.
EDITIONS_MAX = 6
PAGE_BYTES = 128 * 1024
# About 3 ms of work in one turn of the loop.
PARTITIONS_PER_TURN = 5_000
DECISION_AS_PARTITIONS = 5

_NONE = int(ErrorCode.NONE)
_LEADER_NOT_AVAILABLE = int(ErrorCode.LEADER_NOT_AVAILABLE)
_int32 = Struct(">i").pack
_int16 = Struct(">h").pack

Done = Callable[[list[bytes]], None]


class MetadataPages:
    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        # By layout, operations and brokers without the listener, least recently used first.
        self._editions: dict[tuple[int, int, frozenset[BrokerId]], _Edition] = {}

    def list_topics(
        self, image: Image, version: int, operations: int, unlisted: frozenset[BrokerId], done: Done
    ) -> None:
        """Call ``done(pages)`` with all topics of this image in its order, now or after some turns.

        ``operations`` are the authorized operations to list for each topic, in versions that have them.
        ``unlisted`` are the brokers without the client's listener.
        """
        key = (LAYOUTS[bisect_right(LAYOUTS, version) - 1], operations, unlisted)
        edition = self._editions.pop(key, None)
        if edition is None:
            edition = _Edition(*key)
            if len(self._editions) >= EDITIONS_MAX:
                self._drop_one()
        self._editions[key] = edition
        listing = edition.listing
        if listing is None or listing.image is not image:
            listing = edition.listing = _Listing(edition, image, self._spawn)
            listing.waiting.append(done)
            listing.go_on()
        elif listing.is_complete:
            done(listing.pages)
        else:
            listing.waiting.append(done)

    def list_some(
        self,
        image: Image,
        version: int,
        operations_of: Callable[[str], int | None],
        unlisted: frozenset[BrokerId],
        done: Callable[[int, list[bytes]], None],
    ) -> None:
        """Call ``done(count, pages)`` with the topics for which ``operations_of`` does not return None.

        It returns the authorized operations to list, in versions that have them. Every client may see other topics,
        so nothing is kept.
        """
        layout = LAYOUTS[bisect_right(LAYOUTS, version) - 1]
        offline = frozenset(broker.id for broker in image.brokers.values() if broker.fenced)
        packers: dict[int, Callable[[TopicImage], bytes]] = {}
        topics = iter(image.topics.values())
        pages: list[bytes] = []
        count = 0

        def go_on() -> None:
            nonlocal count
            page: list[bytes] = []
            room = PARTITIONS_PER_TURN
            for topic in topics:
                operations = operations_of(topic.name)
                # A decision takes as long as some partitions.
                room -= DECISION_AS_PARTITIONS
                if operations is not None:
                    pack = packers.get(operations)
                    if pack is None:
                        pack = packers[operations] = topic_packer(layout, operations, offline, unlisted)
                    page.append(pack(topic))
                    count += 1
                    room -= len(topic.partitions)
                if room <= 0:
                    pages.append(b"".join(page))
                    self._spawn.soon(go_on)
                    return
            pages.append(b"".join(page))
            done(count, pages)

        go_on()

    def _drop_one(self) -> None:
        """Drop the least recently used edition, but none that is being built: it would be begun again."""
        for key, edition in self._editions.items():
            if edition.listing is None or edition.listing.is_complete:
                del self._editions[key]
                return

    def moved(self, delta: Delta) -> None:
        """The image has changed by this delta."""
        changed = [*delta.changed, *delta.created, *(topic.name for topic in delta.deleted)]
        for edition in self._editions.values():
            edition.listing = None
            for name in changed:
                edition.packed.pop(name, None)


class _Edition:
    """All topics in one layout."""

    __slots__ = ("layout", "listing", "offline", "operations", "packed", "unlisted")

    def __init__(self, layout: int, operations: int, unlisted: frozenset[BrokerId]) -> None:
        self.layout = layout
        self.operations = operations
        self.unlisted = unlisted
        # The listing of the current image; None when the image has changed since.
        self.listing: _Listing | None = None
        # By name, each with the topic it was packed from: a changed topic is another object.
        self.packed: dict[str, tuple[TopicImage, bytes]] = {}
        # Brokers that were offline when these were packed.
        self.offline: frozenset[int] = frozenset()


class _Listing:
    """The pages of one image, built over several turns of the loop."""

    __slots__ = ("_edition", "_pack", "_spawn", "_topics", "image", "is_complete", "pages", "waiting")

    def __init__(self, edition: _Edition, image: Image, spawn: Spawn) -> None:
        self._edition = edition
        self._spawn = spawn
        self.image = image
        offline = frozenset(broker.id for broker in image.brokers.values() if broker.fenced)
        if edition.offline != offline:
            edition.offline = offline
            edition.packed = {}
        self._pack = topic_packer(edition.layout, edition.operations, offline, edition.unlisted)
        self._topics: Iterator[TopicImage] = iter(image.topics.values())
        self.pages: list[bytes] = []
        self.is_complete = False
        self.waiting: list[Done] = []

    def go_on(self) -> None:
        room = PARTITIONS_PER_TURN
        while room > 0 and not self.is_complete:
            room -= self._add_page()
        if not self.is_complete:
            self._spawn.soon(self.go_on)
            return
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done(self.pages)

    def _add_page(self) -> int:
        """Return the number of partitions that had to be packed for it."""
        edition = self._edition
        # If a newer image has its own listing, do not touch the topics it uses.
        known = edition.packed if edition.listing is self else {}
        page: list[bytes] = []
        size = partitions = 0
        for topic in self._topics:
            entry = known.get(topic.name)
            if entry is None or entry[0] is not topic:
                entry = known[topic.name] = (topic, self._pack(topic))
                partitions += len(topic.partitions)
            page.append(entry[1])
            size += len(entry[1])
            if size >= PAGE_BYTES or partitions >= PARTITIONS_PER_TURN:
                break
        else:
            self.is_complete = True
        self.pages.append(b"".join(page))
        return partitions


def listener_not_found(version: int) -> ErrorCode:
    """The error of a partition whose leader lacks the client's listener. Older clients know another one."""
    return ErrorCode.LISTENER_NOT_FOUND if version >= 6 else ErrorCode.LEADER_NOT_AVAILABLE


def topic_packer(
    version: int,
    operations: int,
    offline: frozenset[int],
    unlisted: frozenset[BrokerId] = frozenset(),
) -> Callable[[TopicImage], bytes]:
    """Return a function that packs a topic as this version encodes a ``MetadataResponseTopic``."""
    is_flexible = version >= 9
    has_epoch = version >= 7
    start = Struct(">hiii" if has_epoch else ">hii").pack
    after_name = b"" if version < 1 else b"\0"
    after_name_if_internal = b"" if version < 1 else b"\1"
    end = (_int32(operations) if version >= 8 else b"") + (b"\0" if is_flexible else b"")

    def count(size: int) -> bytes:
        return uvarint(size + 1) if is_flexible else _int32(size)

    def ids(values: Sequence[int]) -> bytes:
        return count(len(values)) + b"".join(map(_int32, values))

    def replication(replicas: Sequence[int], isr: Sequence[int]) -> bytes:
        unreachable = [replica for replica in replicas if replica in offline or replica in unlisted]
        return b"".join(
            (
                ids(replicas),
                ids(isr),
                ids(unreachable) if version >= 5 else b"",
                b"\0" if is_flexible else b"",
            )
        )

    without_listener = int(listener_not_found(version))
    # Many partitions share few combinations of replicas and ISR.
    replications: dict[tuple[Sequence[int], Sequence[int]], bytes] = {}

    def pack(topic: TopicImage) -> bytes:
        name = topic.name.encode()
        parts = [
            b"\0\0",
            count(len(name)) if is_flexible else _int16(len(name)),
            name,
            topic.id if version >= 10 else b"",
            after_name_if_internal if is_internal(topic.name) else after_name,
            count(len(topic.partitions)),
        ]
        append = parts.append
        for partition in topic.partitions:
            leader = partition.leader
            error = _NONE if leader != NO_LEADER else _LEADER_NOT_AVAILABLE
            if leader in unlisted:
                leader, error = NO_LEADER, without_listener
            if has_epoch:
                append(start(error, partition.index, leader, partition.leader_epoch))
            else:
                append(start(error, partition.index, leader))
            key = (partition.replicas, partition.isr)
            packed = replications.get(key)
            if packed is None:
                packed = replications[key] = replication(*key)
            append(packed)
        append(end)
        return b"".join(parts)

    return pack
