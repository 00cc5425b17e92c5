"""What every client must see when its consumers form a group.

The truth at each stable point has two witnesses: what the members believe they own, and what the coordinator
answers to another client. Every record arrives once: these members leave politely, so none is read twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.interop.client import PATIENCE_S, Client, ClientError, GroupView, Member, Strategy
from tests.interop.records_contract import by_partition, numbered
from tests.support import wait_until

Unique = Callable[[str], str]

PARTITIONS = 4
ALL = frozenset(range(PARTITIONS))


def settled(members: Sequence[Member]) -> bool:
    """Every partition is owned, by one member only, and nobody is idle."""
    owned = [member.partitions() for member in members]
    return all(owned) and sum(map(len, owned)) == PARTITIONS and frozenset().union(*owned) == ALL


def wait_until_settled(reference: Client, group: str, members: Sequence[Member]) -> GroupView:
    """Wait until the members share all partitions and the coordinator says the very same."""

    def agreed() -> GroupView | None:
        try:
            view = reference.describe_group(group)
        except ClientError as error:
            # On a busy machine a coordinator may be elsewhere for a moment, and not every client asks again.
            if error.name != "NOT_COORDINATOR":
                raise
            return None
        told = sorted(sorted(member.partitions) for member in view.members)
        believed = sorted(sorted(member.partitions()) for member in members)
        return view if settled(members) and view.state == "STABLE" and told == believed else None

    view = wait_until(agreed, PATIENCE_S, f"a stable group of {len(members)}")
    assert view is not None
    return view


def wait_for_values(members: Sequence[Member], count: int) -> None:
    """Wait until the members together hold the values 0..count-1, each exactly once."""

    def values() -> Counter[bytes | None]:
        return Counter(record.value for member in members for record in member.records())

    wait_until(lambda: values().total() >= count, PATIENCE_S, f"{count} records in the group")
    assert values() == Counter(b"%d" % number for number in range(count))


class Sharing:
    STRATEGY: Strategy = "range"

    def test_two_members_share_the_partitions_and_the_one_that_stays_takes_over(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, PARTITIONS)

        client.produce(topic, numbered(PARTITIONS, 40))
        first = client.join(group, topic, strategy=self.STRATEGY)
        wait_until_settled(reference, group, [first])
        wait_for_values([first], 40)

        second = client.join(group, topic, strategy=self.STRATEGY)
        view = wait_until_settled(reference, group, [first, second])
        assert {len(member.partitions) for member in view.members} == {2}
        owners = {first: first.partitions(), second: second.partitions()}
        client.produce(topic, numbered(PARTITIONS, 40, first=40))
        wait_for_values([first, second], 80)
        for member, owned in owners.items():
            late = [record for record in member.records() if int(record.value or b"") >= 40]
            assert {record.partition for record in late} == owned

        second.leave()
        wait_until_settled(reference, group, [first])
        client.produce(topic, numbered(PARTITIONS, 40, first=80))
        wait_for_values([first, second], 120)

        first.leave()
        wait_until(lambda: reference.describe_group(group).state == "EMPTY", PATIENCE_S, "an empty group")
        assert reference.committed(group, topic, ALL) == dict.fromkeys(ALL, 30)

    def test_the_next_member_starts_exactly_where_the_last_one_committed(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, partitions=3)
        client.produce(topic, numbered(3, 60))

        earlier = client.resume(group, topic, 25)
        committed = reference.committed(group, topic, range(3))
        later = client.resume(group, topic, 35)

        assert len(earlier) == 25 and len(later) == 35
        consumed = {partition: records[-1].offset + 1 for partition, records in by_partition(earlier).items()}
        assert committed == consumed
        for partition, records in by_partition(earlier + later).items():
            assert [record.offset for record in records] == list(range(20))
            assert [record.value for record in records] == [b"%d" % (3 * i + partition) for i in range(20)]
        assert reference.committed(group, topic, range(3)) == {0: 20, 1: 20, 2: 20}


class Cooperating:
    """KIP-429: a member keeps what it will own anyway while others join."""

    def test_a_cooperative_member_gives_up_only_what_moves(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, PARTITIONS)

        first = client.join(group, topic, strategy="cooperative-sticky")
        view = wait_until_settled(reference, group, [first])
        assert view.assignor == "cooperative-sticky"
        second = client.join(group, topic, strategy="cooperative-sticky")
        wait_until_settled(reference, group, [first, second])

        assert first.revoked() == 2
        assert second.revoked() == 0
        client.produce(topic, numbered(PARTITIONS, 40))
        wait_for_values([first, second], 40)
        second.leave()
        wait_until_settled(reference, group, [first])
        assert first.revoked() == 2
        client.produce(topic, numbered(PARTITIONS, 40, first=40))
        wait_for_values([first, second], 80)
        first.leave()


class StayingStatic:
    """KIP-345: a member with an instance id may go and come back without anybody being disturbed."""

    def test_a_static_member_returns_to_its_partitions_without_a_rebalance(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, PARTITIONS)
        first = client.join(group, topic, instance_id="one")
        wait_until_settled(reference, group, [first])
        second = client.join(group, topic, instance_id="two")
        view = wait_until_settled(reference, group, [first, second])
        assert {member.instance_id for member in view.members} == {"one", "two"}
        kept, moved, revoked = first.partitions(), second.partitions(), first.revoked()

        second.leave()
        view = reference.describe_group(group)
        assert {member.instance_id for member in view.members} == {"one", "two"}
        again = client.join(group, topic, instance_id="two")
        wait_until_settled(reference, group, [first, again])

        assert again.partitions() == moved
        assert first.partitions() == kept
        assert first.revoked() == revoked
        client.produce(topic, numbered(PARTITIONS, 20))
        wait_for_values([first, again], 20)
        first.leave()
        again.leave()


class ManagingGroups:
    """Looking at groups and their commits."""

    ASSIGNOR = "range"

    def test_groups_are_listed_and_described(self, client: Client, reference: Client, unique: Unique) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, PARTITIONS)
        client.produce(topic, numbered(PARTITIONS, 20))
        member = client.join(group, topic)
        wait_until_settled(reference, group, [member])
        wait_for_values([member], 20)

        assert group in client.groups()
        view = client.describe_group(group)
        assert (view.state, view.assignor) == ("STABLE", self.ASSIGNOR)
        assert [each.partitions for each in view.members] == [ALL]
        assert view.members[0].client_id != ""

        member.leave()
        view = client.describe_group(group)
        assert (view.state, view.members) == ("EMPTY", ())
        assert client.committed(group, topic, ALL) == dict.fromkeys(ALL, 5)


class DeletingGroups:
    def test_a_group_in_use_is_not_deleted_and_an_empty_one_is(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, PARTITIONS)
        member = client.join(group, topic)
        wait_until_settled(reference, group, [member])

        with pytest.raises(ClientError) as refused:
            client.delete_group(group)
        assert refused.value.name == "NON_EMPTY_GROUP"
        member.leave()
        client.delete_group(group)

        assert group not in reference.groups()
        assert reference.committed(group, topic, ALL) == {}
        with pytest.raises(ClientError) as unknown:
            client.delete_group(group)
        assert unknown.value.name == "GROUP_ID_NOT_FOUND"


class AlteringCommits:
    def test_commits_of_an_empty_group_are_altered(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, partitions=2)
        client.produce(topic, numbered(2, 20))

        client.alter_committed(group, topic, {0: 7, 1: 3})

        assert reference.committed(group, topic, range(2)) == {0: 7, 1: 3}
        received = client.resume(group, topic, 10)
        assert {p: records[0].offset for p, records in by_partition(received).items()} == {0: 7, 1: 3}
        client.alter_committed(group, topic, {1: 1})
        assert client.committed(group, topic, range(2)) == {0: 10, 1: 1}


class DeletingCommits:
    """KIP-496."""

    def test_commits_of_single_partitions_are_deleted(
        self, client: Client, reference: Client, unique: Unique
    ) -> None:
        topic, group = unique("topic"), unique("group")
        client.create_topic(topic, partitions=3)
        client.alter_committed(group, topic, {0: 1, 1: 2, 2: 3})

        client.delete_committed(group, topic, [0, 2])

        assert reference.committed(group, topic, range(3)) == {1: 2}
