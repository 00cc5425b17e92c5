"""Conversations of readers with brokers that move, die, fall silent or are of another time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsResponse
from penstock.protocol.messages.fetch import FetchResponse
from penstock.protocol.messages.groups import FindCoordinatorResponse
from penstock.protocol.messages.topics import MetadataRequest, MetadataResponse
from penstock.protocol.records import batches, decode_records
from penstock.wire import admin, groups, operations
from penstock.wire.cluster import PartitionInfo, TopicInfo
from penstock.wire.core import FIRST_CONTACT_MS
from penstock.wire.errors import (
    BadBootstrap,
    BrokerRefused,
    GroupInUse,
    OffsetOutOfRange,
    TimedOut,
    TopicReplaced,
    UnknownTopic,
    Unreachable,
    UnsupportedBroker,
    WireError,
)
from penstock.wire.links import CONNECT_TIMEOUT_MS, Address, Connect
from penstock.wire.operations import EARLIEST, LATEST, MAX_TIMESTAMP
from penstock.wire.polling import FetchSettings
from tests.wire.fake import SILENCE, FakeCluster, FakeShell

AT = TopicPartition("orders", 0)
FETCH, LIST_OFFSETS, METADATA, FIND_COORDINATOR, API_VERSIONS = 1, 2, 3, 10, 18


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.make_topic("orders", [1, 2, 3])
    cluster.fill(AT, batches=4)
    return cluster


def fetch(shell: FakeShell, offset: int = 0, at: TopicPartition = AT, **settings: Any) -> Any:
    return shell.ask(operations.fetch, at, offset, FetchSettings(**settings))


def asked(cluster: FakeCluster, key: int) -> list[tuple[int, int]]:
    """(broker, version) of each request of an API."""
    return [(broker, version) for broker, each, version, _ in cluster.asked if each == key]


def values(records: Any) -> list[bytes | None]:
    return [
        record.value
        for position, _ in batches(records)
        for record in decode_records(records, position, bytes_max=1 << 20)
    ]


# Versions


def test_versions_are_agreed_on_before_anything_else_is_asked(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetched = fetch(shell)
    assert [key for _, key, _, _ in cluster.asked] == [API_VERSIONS, METADATA, API_VERSIONS, FETCH]
    assert values(fetched.records)[0] == b"value-0-0"
    assert asked(cluster, FETCH) == [(1, 18)]


def test_a_broker_that_does_not_know_our_greeting_is_asked_again_in_version_0(cluster: FakeCluster) -> None:
    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == API_VERSIONS and version > 0:
            return ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
        return None

    cluster.interfere = interfere
    assert fetch(FakeShell(cluster)).next_offset == 12
    assert [version for _, version in asked(cluster, API_VERSIONS)] == [3, 0, 3, 0]


def test_an_older_broker_is_asked_by_name(cluster: FakeCluster) -> None:
    cluster.version_max = {FETCH: 12, METADATA: 9, LIST_OFFSETS: 5}
    cluster.has_topic_ids = False
    shell = FakeShell(cluster)
    assert fetch(shell).next_offset == 12
    assert shell.ask(operations.list_offsets, {AT: LATEST}, False)[AT].offset == 12
    assert asked(cluster, FETCH) == [(1, 12)]
    assert cluster.asked[3][3].topics[0].topic == "orders"


def test_a_question_that_the_broker_cannot_understand_is_refused_clearly(cluster: FakeCluster) -> None:
    cluster.version_max = {LIST_OFFSETS: 6}
    shell = FakeShell(cluster)
    with pytest.raises(UnsupportedBroker, match="ListOffsets versions 1 to 6"):
        shell.ask(operations.list_offsets, {AT: MAX_TIMESTAMP}, False)
    cluster.version_max = {FETCH: -1}
    with pytest.raises(UnsupportedBroker, match="does not support Fetch"):
        fetch(FakeShell(cluster))


def test_whoever_is_no_broker_is_called_so(cluster: FakeCluster) -> None:
    cluster.interfere = lambda *_: b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with pytest.raises(Unreachable, match="is not a plaintext Kafka broker"):
        fetch(FakeShell(cluster))


# Finding the leader


def test_a_leader_that_moved_is_followed_by_the_hint_alone(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    cluster.move(AT, 3)
    asked_before = len(asked(cluster, METADATA))
    assert fetch(shell, 3).next_offset == 12
    assert asked(cluster, FETCH) == [(1, 18), (1, 18), (3, 18)]
    assert len(asked(cluster, METADATA)) == asked_before


def test_without_a_hint_metadata_is_asked_for(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    cluster.has_hints = False
    cluster.move(AT, 3)
    asked_before = len(asked(cluster, METADATA))
    assert fetch(shell, 3).next_offset == 12
    assert len(asked(cluster, METADATA)) == asked_before + 1


def test_metadata_that_is_behind_does_not_lead_back(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    old = cluster._metadata(1, 12, MetadataRequest(topics=None))
    cluster.move(AT, 3)
    fetch(shell)
    shell.core.cluster.learn(old)
    place = shell.core.cluster.leader(AT)
    assert place is not None
    assert place[0] == cluster.addresses[3]


def test_a_leader_that_dies_in_the_middle_is_replaced(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, bootstrap="broker-2:9092,broker-1:9092")
    fetch(shell)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 3, FetchSettings()))
    shell.stop_broker(1)
    elected = False

    def done() -> bool:
        nonlocal elected
        if shell.now_ms > 3_000 and not elected:
            elected = True
            cluster.move(AT, 2)
        return task.is_done

    shell.run(done)
    assert task.outcome().next_offset == 12
    assert asked(cluster, FETCH)[-1] == (2, 18)


@pytest.mark.parametrize("error", [ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH])
def test_an_epoch_that_does_not_fit_is_looked_up(cluster: FakeCluster, error: ErrorCode) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    topic = shell.core.cluster.topics["orders"]
    wrong = -1 if error == ErrorCode.FENCED_LEADER_EPOCH else 1
    if wrong == -1:
        cluster.partition(AT).epoch += 1
    else:
        # The broker has not heard of its own new epoch yet, and does while we wait.
        known = PartitionInfo(1, 1)
        shell.core.cluster.topics["orders"] = TopicInfo(
            "orders", topic.topic_id, {**topic.partitions, 0: known}, False
        )
        tries = 0

        def interfere(broker: int, key: int, version: int, request: Any) -> Any:
            nonlocal tries
            tries += key == FETCH
            if tries == 3:
                cluster.partition(AT).epoch = 1
            return None

        cluster.interfere = interfere
    assert fetch(shell, 3).next_offset == 12


def test_dead_brokers_in_the_list_are_passed_over(cluster: FakeCluster) -> None:
    cluster.down.add(2)
    shell = FakeShell(cluster, bootstrap="nowhere:1,broker-2:9092,broker-1:9092")
    assert fetch(shell).next_offset == 12
    assert shell.now_ms < 3_000


def test_a_silent_broker_is_given_up_for_another(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, bootstrap="broker-2:9092,broker-1:9092")
    shell.silent.add(2)
    assert fetch(shell).next_offset == 12
    assert shell.now_ms == 1_000 + CONNECT_TIMEOUT_MS


@pytest.mark.parametrize("bootstrap", ["broker-2:9092", "broker-1:9092"])
def test_a_leader_that_falls_silent_costs_one_timeout(cluster: FakeCluster, bootstrap: str) -> None:
    # Also if it is the one that has been asked about the cluster so far.
    shell = FakeShell(cluster, bootstrap=bootstrap, request_timeout_ms=5_000)
    fetch(shell)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 3, FetchSettings()))
    shell.silent.add(1)
    cluster.move(AT, 3)
    shell.run(lambda: task.is_done)
    assert task.outcome().next_offset == 12
    assert 6_000 <= shell.now_ms < 8_000


def test_a_large_answer_that_keeps_coming_is_not_silence(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, request_timeout_ms=5_000)
    fetch(shell)
    cluster.fill(AT, batches=3_000)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 0, FetchSettings()))
    (number,) = shell.can_act()
    shell.act(number)
    data = shell.links[number].answers.popleft()
    assert len(data) > 250_000
    for start in range(0, len(data), 65_536):
        shell.wait(4_000)
        piece = data[start : start + 65_536]
        while piece:
            space = shell.core.space(number)
            assert space is not None
            count = min(len(space), len(piece))
            space[:count] = piece[:count]
            piece = piece[count:]
            shell.core.received(number, count, shell.now_ms)
    assert task.is_done
    assert task.outcome().next_offset == cluster.partition(AT).log_end_offset


def test_nobody_to_be_reached_is_said_after_a_while(cluster: FakeCluster) -> None:
    cluster.down.update((1, 2, 3))
    shell = FakeShell(cluster)
    with pytest.raises(Unreachable, match=r"cannot reach any of broker-1:9092; is a broker running there\?"):
        fetch(shell)
    assert FIRST_CONTACT_MS <= shell.now_ms - 1_000 < 2 * FIRST_CONTACT_MS


def test_a_cluster_that_was_there_is_waited_for_until_the_deadline(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, deadline_ms=60_000)
    fetch(shell)
    for broker in (1, 2, 3):
        shell.stop_broker(broker)
    with pytest.raises(Unreachable, match="connection refused"):
        fetch(shell)
    assert shell.now_ms >= 61_000
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 0, FetchSettings()))
    shell.wait(5_000)
    cluster.down.clear()
    assert shell.result(task).next_offset == 12


def test_connecting_again_is_not_tried_in_a_hurry(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    shell.refusing.add(1)
    for number in [number for number, link in shell.links.items() if link.broker == 1]:
        shell.lose(number)
    with pytest.raises(TimedOut, match="broker-1:9092: connection refused"):
        fetch(shell)
    attempts = [each for each in shell.effects if each == Connect(each.link, Address("broker-1", 9092))]
    assert 20 < len(attempts) < 400


def test_a_partition_without_a_leader_is_waited_for(cluster: FakeCluster) -> None:
    cluster.partition(AT).leader = -1
    shell = FakeShell(cluster)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 0, FetchSettings()))
    shell.run(lambda: shell.now_ms > 20_000)
    assert not task.is_done
    cluster.move(AT, 2)
    assert shell.result(task).next_offset == 12


def test_without_a_leader_until_the_deadline_is_an_error_that_says_so(cluster: FakeCluster) -> None:
    cluster.partition(AT).leader = -1
    with pytest.raises(TimedOut, match="did not succeed within 120 s: orders-0 has no leader"):
        fetch(FakeShell(cluster))


# Topics


def test_an_unknown_topic_is_an_error_that_names_it(cluster: FakeCluster) -> None:
    with pytest.raises(UnknownTopic, match="no topic nothing"):
        fetch(FakeShell(cluster), at=TopicPartition("nothing", 0))
    with pytest.raises(UnknownTopic, match="topic orders has no partition 7; it has 3"):
        fetch(FakeShell(cluster), at=TopicPartition("orders", 7))


def test_a_topic_that_brokers_have_not_heard_of_yet_is_waited_for(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    late = TopicPartition("late", 0)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, late, 0, FetchSettings()))
    shell.run(lambda: shell.now_ms > 1_500)
    cluster.make_topic("late", [2])
    cluster.fill(late, batches=1)
    assert shell.result(task).next_offset == 3


def test_topics_that_do_not_exist_are_left_out(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    assert list(shell.ask(operations.topics, ["nothing", "orders"])) == ["orders"]
    everything = shell.ask(operations.topics, None)
    assert {number: each.leader for number, each in everything["orders"].partitions.items()} == {
        0: 1,
        1: 2,
        2: 3,
    }


def test_a_deleted_topic_is_forgotten(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    del cluster.topics["orders"]
    assert shell.ask(operations.topics, None) == {}
    with pytest.raises(UnknownTopic):
        fetch(shell)


def test_a_topic_made_anew_is_read_by_its_new_id(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    cluster.make_topic("orders", [1])
    cluster.fill(AT, batches=1)
    assert fetch(shell).next_offset == 3


def test_a_reader_does_not_go_on_in_a_topic_made_anew(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    topic_id = fetch(shell).topic_id
    cluster.make_topic("orders", [1])
    cluster.fill(AT, batches=8)
    with pytest.raises(TopicReplaced, match="deleted and recreated"):
        shell.ask(operations.fetch, AT, 12, FetchSettings(), topic_id)


def test_a_client_that_remembers_the_topic_before_looks_again(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    cluster.make_topic("orders", [1])
    cluster.fill(AT, batches=1)
    topic_id = cluster.topics["orders"][0]
    assert shell.ask(operations.fetch, AT, 0, FetchSettings(), topic_id).next_offset == 3


def test_making_a_topic_waits_for_its_leaders_and_is_no_error_twice(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    assert shell.ask(admin.create_topic, "new", 2, -1, {}) is True
    assert shell.ask(admin.create_topic, "new", 2, -1, {}) is False


def test_a_topic_that_was_made_without_our_hearing_of_it_is_ours(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, bootstrap="broker-2:9092")
    shell.ask(operations.topics, None)
    task = shell.start("making", lambda core, task: admin.create_topic(core, task, "new", 1, -1, {}))
    shell.run(lambda: "new" in cluster.topics)
    for number in list(shell.links):
        shell.lose(number)
    assert shell.result(task) is True


# Offsets


def test_offsets_of_many_partitions_are_asked_of_their_leaders_at_once(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    shell.ask(operations.topics, None)
    wanted = {TopicPartition("orders", number): LATEST for number in range(3)}
    task = shell.start("listing", lambda core, task: operations.list_offsets(core, task, wanted, False))
    assert {shell.links[number].broker for number in shell.can_act()} == {1, 2, 3}
    assert [each.offset for each in shell.result(task).values()] == [12, 0, 0]


def test_offsets_that_were_found_are_not_asked_for_again(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    shell.ask(operations.topics, None)
    cluster.move(TopicPartition("orders", 1), 3)
    wanted = {TopicPartition("orders", number): EARLIEST for number in range(3)}
    assert len(shell.ask(operations.list_offsets, wanted, False)) == 3
    listed = [
        (broker, [each.partition_index for each in request.topics[0].partitions])
        for broker, key, _, request in cluster.asked
        if key == LIST_OFFSETS
    ]
    assert sorted(listed) == [(1, [0]), (2, [1]), (3, [1]), (3, [2])]


def test_an_offset_out_of_range_says_what_the_log_holds(cluster: FakeCluster) -> None:
    cluster.partition(AT).log_start_offset = 6
    shell = FakeShell(cluster)
    for offset in (3, 13):
        with pytest.raises(OffsetOutOfRange) as caught:
            fetch(shell, offset)
        assert (caught.value.log_start_offset, caught.value.high_watermark) == (6, 12)


def test_an_offset_that_has_come_into_range_since_is_fetched_again(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    tries = 0

    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        nonlocal tries
        tries += key == FETCH
        if key == FETCH and tries == 1:
            answer = cluster._fetch(broker, version, request)
            answer.responses[0].partitions[0].error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            return answer
        return None

    cluster.interfere = interfere
    assert fetch(shell, 3).next_offset == 12


def test_an_empty_answer_of_a_broker_that_throttles_is_fetched_again(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    tries = 0

    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        nonlocal tries
        tries += key == FETCH
        return FetchResponse(throttle_time_ms=700, responses=[]) if key == FETCH and tries < 3 else None

    cluster.interfere = interfere
    assert fetch(shell, 3).next_offset == 12
    assert tries == 3


def test_an_error_that_no_retry_changes_is_raised_at_once(cluster: FakeCluster) -> None:
    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == FETCH:
            answer = cluster._fetch(broker, version, request)
            answer.responses[0].partitions[0].error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            return answer
        return None

    cluster.interfere = interfere
    with pytest.raises(BrokerRefused, match="topic authorization failed"):
        fetch(FakeShell(cluster))


# Records


def test_the_next_offset_is_behind_the_last_whole_batch(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    size = len(cluster.partition(AT).batches[0][1])
    fetched = fetch(shell, 4, bytes_max=2 * size + 10)
    assert fetched.next_offset == 9
    assert len(fetched.records) == 2 * size + 10
    assert fetch(shell, 12).next_offset == 12


def test_a_batch_that_an_old_broker_cuts_is_asked_for_with_more_room(cluster: FakeCluster) -> None:
    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == FETCH:
            answer = cluster._fetch(broker, version, request)
            data = answer.responses[0].partitions[0]
            assert isinstance(data.records, bytes | bytearray | memoryview)
            data.records = data.records[: request.max_bytes]
            return answer
        return None

    cluster.interfere = interfere
    assert fetch(FakeShell(cluster), bytes_max=40).next_offset >= 3


# Groups


def test_offsets_are_committed_to_the_coordinator_wherever_it_moves(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    shell.ask(groups.commit, "readers", {AT: 7}, "")
    cluster.coordinator = 3
    shell.ask(groups.commit, "readers", {AT: 9}, "")
    cluster.coordinator = 2
    other = TopicPartition("orders", 1)
    assert shell.ask(groups.committed, "readers", [AT, other]) == {AT: 9}
    _, _, version, request = next(each for each in cluster.asked if each[1] == 8)
    assert (version, request.generation_id_or_member_epoch, request.member_id) == (9, -1, "")


def test_an_old_coordinator_is_asked_for_one_group(cluster: FakeCluster) -> None:
    cluster.version_max = {8: 2, 9: 2, 10: 0}
    shell = FakeShell(cluster)
    shell.ask(groups.commit, "readers", {AT: 7}, "")
    assert shell.ask(groups.committed, "readers", [AT]) == {AT: 7}


def test_a_group_with_members_is_not_ours_to_commit_to(cluster: FakeCluster) -> None:
    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == 8:
            answer = cluster._offsetcommit(broker, version, request)
            answer.topics[0].partitions[0].error_code = ErrorCode.UNKNOWN_MEMBER_ID
            return answer
        return None

    cluster.interfere = interfere
    with pytest.raises(GroupInUse, match="choose another group"):
        FakeShell(cluster).ask(groups.commit, "readers", {AT: 7}, "")


# The core itself


def test_a_cluster_that_says_it_is_another_is_begun_with_anew(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    said: list[int] = []

    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == METADATA and not said:
            said.append(broker)
            return MetadataResponse(error_code=ErrorCode.REBOOTSTRAP_REQUIRED)
        return None

    cluster.interfere = interfere
    assert list(shell.ask(operations.topics, ["orders"])) == ["orders"]
    assert said


def test_a_pause_of_the_caller_makes_nothing_late(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, request_timeout_ms=5_000, deadline_ms=20_000)
    fetch(shell)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 3, FetchSettings()))
    shell.now_ms += 100_000
    shell.core.slept(100_000)
    shell.wait(0)
    assert not task.is_done
    assert shell.result(task).next_offset == 12
    assert len(asked(cluster, FETCH)) == 2, "it was not asked again"


def test_a_task_given_up_is_answered_to_nobody(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    task = shell.start("fetching", lambda core, task: operations.fetch(core, task, AT, 3, FetchSettings()))
    shell.core.cancel(task)
    assert fetch(shell, 6).next_offset == 12
    assert task.result is None


def test_a_question_that_cannot_be_written_harms_only_who_asked_it(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    fetch(shell)
    for _ in range(2):
        with pytest.raises(WireError, match="cannot encode the request ListOffsets"):
            shell.ask(operations.list_offsets, {AT: 2**70, TopicPartition("orders", 1): LATEST}, False)
    assert fetch(shell, 3).next_offset == 12
    shell.core.check()


def test_an_answer_that_lacks_what_was_asked_for_harms_only_who_asked(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster)
    cluster.interfere = lambda broker, key, version, request: (
        FindCoordinatorResponse() if key == FIND_COORDINATOR else None
    )
    with pytest.raises(IndexError):
        shell.ask(groups.committed, "group", [AT])
    shell.core.check()
    assert fetch(shell).next_offset == 12


def test_a_broker_that_never_answers_one_request_is_left(cluster: FakeCluster) -> None:
    shell = FakeShell(cluster, request_timeout_ms=2_000)
    swallowed: list[int] = []

    def interfere(broker: int, key: int, version: int, request: Any) -> Any:
        if key == FETCH and not swallowed:
            swallowed.append(request)
            return SILENCE
        return None

    cluster.interfere = interfere
    assert fetch(shell).next_offset == 12
    assert shell.now_ms == 1_000 + 2_000 + FetchSettings().wait_ms


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("localhost", "write HOST:PORT"),
        ("", "write HOST:PORT"),
        (" , ", "write HOST:PORT"),
        ("SSL://a:1", "write a:1, and set security.protocol to ssl"),
        (":9092", "write HOST:PORT"),
        ("::1:9092", r"\[::1\]:9092"),
        ("host:http", "is not a port"),
        ("host:0", "is not a port"),
        ("host:70000", "is not a port"),
    ],
)
def test_a_list_of_brokers_that_is_none_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadBootstrap, match=what):
        FakeShell(FakeCluster(), bootstrap=text)


def test_a_list_of_brokers_may_be_written_as_for_javas_clients() -> None:
    shell = FakeShell(FakeCluster(), bootstrap="a:1,,PLAINTEXT://b:2, ")
    assert shell.core.cluster.bootstrap == [Address("a", 1), Address("b", 2)]


def test_an_address_in_brackets_is_one_of_the_sixth_version() -> None:
    shell = FakeShell(FakeCluster(), bootstrap="[::1]:9092, b:2,b:2")
    assert shell.core.cluster.bootstrap == [Address("::1", 9092), Address("b", 2)]
    assert str(shell.core.cluster.bootstrap[0]) == "[::1]:9092"
