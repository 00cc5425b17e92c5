"""How a group's leader assigns partitions: range, roundrobin, sticky and cooperative-sticky, as other clients name
them.

Only the leader computes, so members of other clients need the same names and messages, not the same arithmetic.
Each assignor gets the members and the number of partitions of each topic, and gives every partition of a
subscribed topic to exactly one of its subscribers.

A cooperative group moves a partition in two generations, because its owner gives it up only after the first:
``withheld`` leaves it unassigned until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from struct import error as StructError
from struct import pack, unpack_from
from typing import NamedTuple, TypeAlias

from penstock.model import TopicPartition
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages import consumer_protocol as messages
from penstock.protocol.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    StickyAssignorUserData,
)
from penstock.protocol.schema import decode, decoder, encode

RANGE, ROUND_ROBIN, STICKY, COOPERATIVE_STICKY = "range", "roundrobin", "sticky", "cooperative-sticky"
# Of subscriptions and assignments. Readers of older versions read the part they know.
VERSION = 3
USER_DATA_VERSION = 1


class Subscriber(NamedTuple):
    """A member, as its subscription describes it."""

    member_id: str
    instance_id: str | None
    topics: Sequence[str]
    # What it had in ``generation``.
    owned: Sequence[TopicPartition] = ()
    generation: int = -1

    @property
    def rank(self) -> tuple[bool, str]:
        """Static members first, by the name that outlives their member ids."""
        return (self.instance_id is None, self.instance_id or self.member_id)


Assignment: TypeAlias = dict[str, list[TopicPartition]]
Assignor: TypeAlias = Callable[[Sequence[Subscriber], Mapping[str, int]], Assignment]


def range_(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """Neighbouring partitions together, and the same numbers of all topics."""
    assigned: Assignment = {member.member_id: [] for member in members}
    for topic in sorted(counts):
        takers = sorted((member for member in members if topic in member.topics), key=lambda one: one.rank)
        if not takers:
            continue
        share, more = divmod(counts[topic], len(takers))
        first = 0
        for number, taker in enumerate(takers):
            behind = first + share + (number < more)
            assigned[taker.member_id] += [TopicPartition(topic, each) for each in range(first, behind)]
            first = behind
    return assigned


def round_robin(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """In turn."""
    assigned: Assignment = {member.member_id: [] for member in members}
    turn = cycle(sorted(members, key=lambda member: member.rank))
    subscribed = {topic for member in members for topic in member.topics}
    for topic in sorted(counts):
        if topic not in subscribed:
            continue
        for number in range(counts[topic]):
            taker = next(member for member in turn if topic in member.topics)
            assigned[taker.member_id].append(TopicPartition(topic, number))
    return assigned


def sticky(members: Sequence[Subscriber], counts: Mapping[str, int]) -> Assignment:
    """As even as it can be by moving single partitions, and as much as possible as it was."""
    ordered = sorted(members, key=lambda member: member.rank)
    takers = {topic: [one.member_id for one in ordered if topic in one.topics] for topic in sorted(counts)}
    assigned: Assignment = {member.member_id: [] for member in ordered}
    owners = owners_of(members)
    free = []
    for topic, able in takers.items():
        for number in range(counts[topic]) if able else ():
            at = TopicPartition(topic, number)
            if owners.get(at) in able:
                assigned[owners[at]].append(at)
            else:
                free.append(at)
    for at in free:
        taker = min(takers[at.topic], key=lambda member_id: len(assigned[member_id]))
        assigned[taker].append(at)
    moved = True
    while moved:
        moved = False
        for giver in sorted(assigned, key=lambda member_id: -len(assigned[member_id])):
            for at in reversed(assigned[giver]):
                taker = min(takers[at.topic], key=lambda member_id: len(assigned[member_id]))
                if len(assigned[taker]) + 1 < len(assigned[giver]):
                    assigned[giver].remove(at)
                    assigned[taker].append(at)
                    moved = True
    return assigned


ASSIGNORS: dict[str, Assignor] = {
    RANGE: range_,
    ROUND_ROBIN: round_robin,
    STICKY: sticky,
    COOPERATIVE_STICKY: sticky,
}


def owners_of(members: Sequence[Subscriber]) -> dict[TopicPartition, str]:
    """Who has each partition: of several the one of the latest generation, and of the same generation nobody."""
    claims: dict[TopicPartition, dict[int, list[str]]] = {}
    for member in members:
        for at in member.owned:
            claims.setdefault(at, {}).setdefault(member.generation, []).append(member.member_id)
    latest = {at: by_generation[max(by_generation)] for at, by_generation in claims.items()}
    return {at: found[0] for at, found in latest.items() if len(found) == 1}


def withheld(assigned: Assignment, members: Sequence[Subscriber]) -> Assignment:
    """Without partitions that another member has still to give up."""
    holders: dict[TopicPartition, set[str]] = {}
    for member in members:
        for at in member.owned:
            holders.setdefault(at, set()).add(member.member_id)
    return {
        member_id: [at for at in places if holders.get(at, {member_id}) <= {member_id}]
        for member_id, places in assigned.items()
    }


# Messages between members


def encode_subscription(
    topics: Sequence[str], assignor: str, owned: Sequence[TopicPartition], generation: int
) -> bytes:
    user_data = None
    if assignor in (STICKY, COOPERATIVE_STICKY):
        previous = StickyAssignorUserData(previous_assignment=_by_topic(owned), generation=generation)
        user_data = encode(previous, USER_DATA_VERSION)
    message = ConsumerProtocolSubscription(
        topics=list(topics),
        user_data=user_data,
        # An eager member has given up everything when it joins.
        owned_partitions=_by_topic(owned) if assignor == COOPERATIVE_STICKY else [],
        generation_id=generation,
    )
    return pack(">h", VERSION) + encode(message, VERSION)


def decode_subscription(
    member_id: str, instance_id: str | None, metadata: bytes, assignor: str
) -> Subscriber:
    """A member of any client. What cannot be read, such as foreign user data, is taken as nothing."""
    try:
        (version,) = unpack_from(">h", metadata)
        # Newer versions add fields at the end.
        message = decoder(ConsumerProtocolSubscription, min(max(version, 0), VERSION))(
            memoryview(metadata), 2
        )[0]
    except (DecodeError, StructError, ValueError, IndexError) as error:
        raise DecodeError(f"member {member_id} has a subscription that cannot be read: {error}") from None
    owned, generation = _partitions(message.owned_partitions), message.generation_id
    if assignor == STICKY or (assignor == COOPERATIVE_STICKY and version < 2 and not owned):
        owned, generation = _previous(message.user_data)
    return Subscriber(member_id, instance_id, message.topics, owned, generation)


def encode_assignment(places: Sequence[TopicPartition]) -> bytes:
    message = ConsumerProtocolAssignment(assigned_partitions=_by_topic(places))
    return pack(">h", VERSION) + encode(message, VERSION)


def decode_assignment(data: bytes) -> list[TopicPartition]:
    """Raises DecodeError."""
    if not data:
        return []
    try:
        message = decoder(ConsumerProtocolAssignment, 0)(memoryview(data), 2)[0]
    except (StructError, ValueError, IndexError) as error:
        raise DecodeError(f"an assignment that cannot be read: {error}") from None
    return _partitions(message.assigned_partitions)


def _previous(user_data: bytes | None) -> tuple[list[TopicPartition], int]:
    for version in (USER_DATA_VERSION, 0) if user_data else ():
        try:
            message = decode(StickyAssignorUserData, version, bytes(user_data or b""))
        except (DecodeError, StructError, ValueError, IndexError):
            continue
        return _partitions(message.previous_assignment), message.generation
    return [], -1


def _by_topic(places: Sequence[TopicPartition]) -> list[messages.TopicPartition]:
    found: dict[str, list[int]] = {}
    for at in sorted(places):
        found.setdefault(at.topic, []).append(at.partition)
    return [messages.TopicPartition(topic=topic, partitions=numbers) for topic, numbers in found.items()]


def _partitions(topics: Sequence[messages.TopicPartition]) -> list[TopicPartition]:
    return [TopicPartition(each.topic, number) for each in topics for number in each.partitions]
