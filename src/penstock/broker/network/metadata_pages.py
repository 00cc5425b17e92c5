"""Every topic in bytes, as a Metadata answer for all of them lists it.

A hundred thousand partitions as message objects cost the loop most of a second. So a topic is packed without
objects, kept until it changes, and the list is put together in pages, a few of them in a turn. The pages are
shared by all who ask until the image moves.

What a newcomer gets wrong: what is said of a topic depends on more than the topic. Which brokers are offline is
in it too, so a change of that starts over; what depends on anything else (the brokers, the controller) is not
in here but written anew for each answer (``handlers/topics.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from struct import Struct

from penstock.environment import Spawn
from penstock.metadata.image import NO_LEADER, Delta, Image, TopicImage
from penstock.metadata.topics import is_internal
from penstock.protocol.errors import ErrorCode
from penstock.protocol.primitives import uvarint

# The versions that first said something else of a topic. From 10 on only what is around them changed.
LAYOUTS = (0, 1, 5, 7, 8, 9, 10)
# Clients of one cluster speak few versions; each that is kept takes some 10 MB for 100,000 partitions.
EDITIONS_MAX = 3
PAGE_BYTES = 128 * 1024
# Some 3 ms. Then whoever else has something to do has a turn.
PARTITIONS_PER_TURN = 5_000

_NONE = int(ErrorCode.NONE)
_LEADER_NOT_AVAILABLE = int(ErrorCode.LEADER_NOT_AVAILABLE)
_int32 = Struct(">i").pack
_int16 = Struct(">h").pack

Done = Callable[[list[bytes]], None]


class MetadataPages:
    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        # By layout and operations; the one asked for last is the last.
        self._editions: dict[tuple[int, int], _Edition] = {}

    def list_topics(self, image: Image, version: int, operations: int, done: Done) -> None:
        """``done(pages)`` with all topics of this image in its order, now or after some turns.

        ``operations`` are those that whoever asks may do on each topic, where the version has them.
        """
        key = (LAYOUTS[bisect_right(LAYOUTS, version) - 1], operations)
        edition = self._editions.pop(key, None) or _Edition(*key)
        self._editions[key] = edition
        if len(self._editions) > EDITIONS_MAX:
            del self._editions[next(iter(self._editions))]
        listing = edition.listing
        if listing is None or listing.image is not image:
            listing = edition.listing = _Listing(edition, image, self._spawn)
            listing.waiting.append(done)
            listing.go_on()
        elif listing.is_complete:
            done(listing.pages)
        else:
            listing.waiting.append(done)

    def moved(self, delta: Delta) -> None:
        """There is another image, which differs by this much."""
        changed = [*delta.changed, *delta.created, *(topic.name for topic in delta.deleted)]
        for edition in self._editions.values():
            edition.listing = None
            for name in changed:
                edition.packed.pop(name, None)


class _Edition:
    """What all topics look like in one layout."""

    __slots__ = ("layout", "listing", "offline", "operations", "packed")

    def __init__(self, layout: int, operations: int) -> None:
        self.layout = layout
        self.operations = operations
        # The newest one, while its image is.
        self.listing: _Listing | None = None
        # By name, each with what it was packed from: a topic that changed is another object.
        self.packed: dict[str, tuple[TopicImage, bytes]] = {}
        # Brokers that could not be reached when these were packed.
        self.offline: frozenset[int] = frozenset()


class _Listing:
    """All topics of one image, as far as they have been put together."""

    __slots__ = ("_edition", "_pack", "_spawn", "_topics", "image", "is_complete", "pages", "waiting")

    def __init__(self, edition: _Edition, image: Image, spawn: Spawn) -> None:
        self._edition = edition
        self._spawn = spawn
        self.image = image
        offline = frozenset(broker.id for broker in image.brokers.values() if broker.fenced)
        if edition.offline != offline:
            edition.offline = offline
            edition.packed = {}
        self._pack = topic_packer(edition.layout, edition.operations, offline)
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
        """Returns how many partitions had to be packed for it."""
        edition = self._edition
        # One that was overtaken by another image leaves alone what that one needs.
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


def topic_packer(version: int, operations: int, offline: frozenset[int]) -> Callable[[TopicImage], bytes]:
    """A function that packs a topic as ``MetadataResponseTopic`` of this version is encoded."""
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
        unreachable = [replica for replica in replicas if replica in offline]
        return b"".join(
            (
                ids(replicas),
                ids(isr),
                ids(unreachable) if version >= 5 else b"",
                b"\0" if is_flexible else b"",
            )
        )

    # Few of them for many partitions.
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
