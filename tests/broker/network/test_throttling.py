"""Quotas on the connections of a broker in virtual time: what is delayed, for how long, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.network import quotas as core
from penstock.broker.network.authorization import Principal
from penstock.broker.network.throttling import DELAY_MS_MAX, MEMBER_DELAY_MS_MAX
from penstock.metadata.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.groups import HeartbeatRequest
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.quotas import (
    AlterClientQuotasRequest,
    DescribeClientQuotasRequest,
    QuotaAlteration,
    QuotaOp,
)
from penstock.protocol.messages.topics import (
    CreatableTopic,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
    MetadataRequest,
    MetadataRequestTopic,
)
from penstock.protocol.records import Record, encode_batch
from tests.virtual import Client, World

ANYBODY = (("client-id", None),)
KB = 1000


class Stage:
    """A broker with a topic, and an administrator whose client id has no quota of its own."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.world = World(settings)
        self.admin = self.world.client(client_id="admin")
        topics = [CreatableTopic(name="t", num_partitions=1, replication_factor=1)]
        assert not self.admin.call(CreateTopicsRequest(topics=topics), 7).topics[0].error_code
        self.throttling = self.world.broker.throttling

    def set(self, key: str, value: float | None, entity: Any = ANYBODY) -> None:
        parts = [QuotaEntityPart(entity_type=type, entity_name=name) for type, name in entity]
        op = QuotaOp(key=key, value=value or 0.0, remove=value is None)
        entry = QuotaAlteration(entity=parts, ops=[op])
        (result,) = self.admin.call(AlterClientQuotasRequest(entries=[entry]), 1).entries
        assert result.error_code == 0, result

    def client(self, client_id: str = "app") -> Client:
        return self.world.client(client_id=client_id)

    def batch(self, size: int) -> memoryview:
        """A batch of exactly this size."""
        empty = len(encode_batch([Record(0, 0, None, b"", ())]))
        value = bytes(size - empty - 4)
        data = encode_batch([Record(0, self.world.clock.wall_ms(), None, value, ())])
        assert abs(len(data) - size) < 10
        return memoryview(data)

    def produce(self, size: int, acks: int = -1) -> ProduceRequest:
        data = PartitionProduceData(index=0, records=self.batch(size))
        return ProduceRequest(
            acks=acks, timeout_ms=30_000, topic_data=[TopicProduceData(name="t", partition_data=[data])]
        )

    def fetch(self, offset: int, session: tuple[int, int] = (0, -1), **values: int) -> FetchRequest:
        wanted = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
        session_id, epoch = session
        return FetchRequest(
            max_wait_ms=values.get("max_wait_ms", 0),
            min_bytes=1,
            max_bytes=1 << 20,
            session_id=session_id,
            session_epoch=epoch,
            topics=[FetchTopic(topic="t", partitions=[wanted])],
        )

    def end_offset(self) -> int:
        hosted = self.world.broker.partitions.get("t", 0)
        assert hosted is not None
        return hosted.log.log_end_offset

    def ms(self, work: Callable[[], object]) -> int:
        began_ms = self.world.clock.now_ms()
        work()
        self.throttling.check()
        return self.world.clock.now_ms() - began_ms


@pytest.fixture
def stage() -> Stage:
    return Stage()


# Produce


def test_a_produce_over_its_quota_is_answered_at_once_and_the_next_waits(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, 10 * KB)
    client = stage.client()
    assert client.call(stage.produce(10 * KB), 9).throttle_time_ms == 0
    answered_ms = stage.ms(lambda: client.call(stage.produce(20 * KB), 9))
    assert answered_ms < 10
    assert client.answers[-1].throttle_time_ms == pytest.approx(2_000, abs=20)
    # Also frames that are there already.
    for _ in range(3):
        client.send(ApiVersionsRequest(), 0)
    assert stage.throttling.delayed == 1
    stage.world.run_for(1_900)
    assert len(client.answers) == 2
    waited_ms = stage.ms(lambda: stage.world.run_until(lambda: len(client.answers) == 5, 1_000))
    assert waited_ms < 130
    assert stage.throttling.delayed == 0


def test_a_client_that_asks_for_ten_times_its_quota_is_held_to_it(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, 100 * KB)
    client = stage.client()
    began_ms, produced = stage.world.clock.now_ms(), 0
    while stage.world.clock.now_ms() - began_ms < 30_000:
        assert not client.call(stage.produce(10 * KB), 9).responses[0].partition_responses[0].error_code
        produced += 10 * KB
    assert 0.9 * 3_000 * KB < produced < 1.1 * 3_000 * KB


def test_a_producer_without_answers_is_delayed_too_and_loses_nothing(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, 10 * KB)
    client = stage.client()
    for _ in range(8):
        client.send(stage.produce(10 * KB, acks=0), 9, expects_answer=False)
    stage.world.run_for(10)
    assert stage.end_offset() == 2
    stage.world.run_for(3_000)
    assert 4 <= stage.end_offset() <= 5
    stage.world.run_for(5_000)
    assert stage.end_offset() == 8 and not client.is_closed


def test_a_client_without_a_quota_is_not_delayed_by_others(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, 10 * KB, (("client-id", "greedy"),))
    greedy, other = stage.client("greedy"), stage.client("other")
    greedy.call(stage.produce(100 * KB), 9)
    assert greedy.answers[-1].throttle_time_ms > 5_000
    for _ in range(5):
        assert stage.ms(lambda: other.call(stage.produce(100 * KB), 9)) < 10
        assert other.answers[-1].throttle_time_ms == 0


def test_fifty_greedy_clients_of_one_user_share_its_quota_fairly(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, 100 * KB, (("user", "ANONYMOUS"),))
    clients = [stage.client(f"greedy-{number}") for number in range(50)]
    request = stage.produce(10 * KB)
    counts = [0] * 50
    begin_ms = stage.world.clock.now_ms()
    for client in clients:
        client.send(request, 9)
    for _ in range(60_000 // 10):
        stage.world.run_for(10)
        for number, client in enumerate(clients):
            while len(client.answers) > counts[number]:
                counts[number] += 1
                client.send(request, 9)
    seconds = (stage.world.clock.now_ms() - begin_ms) / 1000
    # The first request of each is served at once: half a megabyte.
    assert sum(counts) * 10 * KB == pytest.approx(100 * KB * seconds + 500 * KB, rel=0.1)
    assert max(counts) - min(counts) <= 2, counts


def test_the_delay_is_limited_and_shorter_for_members_of_groups(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB)
    client = stage.client()
    assert client.call(stage.produce(500 * KB), 9).throttle_time_ms == DELAY_MS_MAX
    member = stage.client("member")
    member.call(HeartbeatRequest(group_id="g", generation_id=1, member_id="m"), 4)
    assert member.call(stage.produce(500 * KB), 9).throttle_time_ms == MEMBER_DELAY_MS_MAX
    assert (
        stage.ms(lambda: member.call(HeartbeatRequest(group_id="g", generation_id=1, member_id="m"), 4))
        < 5_100
    )


# Connections


def test_a_muted_connection_is_not_idle(stage: Stage) -> None:
    stage = Stage({"connections.max.idle.ms": "3000"})
    stage.set(PRODUCER_BYTE_RATE, KB)
    client = stage.client()
    client.call(stage.produce(18 * KB), 9)
    client.send(ApiVersionsRequest(), 0)
    stage.world.run_for(16_000)
    assert not client.is_closed and len(client.answers) == 1
    stage.world.run_for(2_000)
    assert len(client.answers) == 2


def test_a_connection_that_closes_while_it_is_delayed_leaves_no_timer(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB)
    client = stage.client()
    client.call(stage.produce(18 * KB), 9)
    assert stage.throttling.delayed == 1
    assert stage.world.node.client is not None
    stage.world.node.client.close()
    assert stage.throttling.delayed == 0
    stage.world.run_for(30_000)


def test_a_partial_frame_does_not_time_out_while_its_connection_is_muted(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB)
    client = stage.client()
    client.send(stage.produce(20 * KB), 9)
    client.stream.send([b"\0\0\0"])
    stage.world.run_for(15_000)
    assert not client.is_closed and len(client.answers) == 1


def test_a_client_id_or_a_principal_that_changes_is_looked_up_again(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB, (("user", "alice"),))
    client = stage.client()
    assert client.call(stage.produce(10 * KB), 9).throttle_time_ms == 0
    assert stage.world.node.client is not None
    *_, connection = stage.world.node.client._connections
    connection.principal = Principal("User", "alice")
    assert client.call(stage.produce(10 * KB), 9).throttle_time_ms > 8_000


# Quotas that change while a client is delayed


@pytest.mark.parametrize(
    ("change", "left_ms"),
    [(20 * KB, 4_000), (5 * KB, 16_000), (None, 0)],
    ids=["raised", "lowered", "removed"],
)
def test_a_quota_that_changes_counts_at_once_for_who_is_delayed(
    stage: Stage, change: float | None, left_ms: int
) -> None:
    stage.set(PRODUCER_BYTE_RATE, 10 * KB)
    client = stage.client()
    assert client.call(stage.produce(110 * KB), 9).throttle_time_ms == pytest.approx(10_000, abs=20)
    client.send(ApiVersionsRequest(), 0)
    stage.world.run_for(2_000)
    stage.set(PRODUCER_BYTE_RATE, change)
    waited_ms = stage.ms(lambda: stage.world.run_until(lambda: len(client.answers) == 2, 30_000))
    assert waited_ms == pytest.approx(left_ms, abs=60)


def test_a_stronger_quota_of_its_own_frees_who_is_delayed(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB)
    client = stage.client()
    client.call(stage.produce(20 * KB), 9)
    client.send(ApiVersionsRequest(), 0)
    stage.set(PRODUCER_BYTE_RATE, 1_000 * KB, (("client-id", "app"),))
    # The same usage, a thousand times as fast.
    assert stage.ms(lambda: stage.world.run_until(lambda: len(client.answers) == 2, 1_000)) < 50


def test_quotas_hold_after_a_restart(stage: Stage) -> None:
    stage.set(PRODUCER_BYTE_RATE, KB)
    again = stage.world.restarted(clean=True)
    assert again.broker.throttling.limits_produce
    (entry,) = again.client().call(DescribeClientQuotasRequest(), 1).entries
    assert [(value.key, value.value) for value in entry.values] == [(PRODUCER_BYTE_RATE, KB)]


# Fetch


def filled(stage: Stage, batches: int = 60) -> None:
    for _ in range(batches):
        stage.admin.call(stage.produce(10 * KB), 9)


def size_of(response: Any) -> int:
    return sum(len(data.records) for topic in response.responses for data in topic.partitions)


def test_a_fetch_gets_a_burst_and_its_connection_waits(stage: Stage) -> None:
    filled(stage)
    stage.set(CONSUMER_BYTE_RATE, 30 * KB)
    client = stage.client()
    began_ms, fetched, offset = stage.world.clock.now_ms(), 0, 0
    while offset < 60:
        response = client.call(stage.fetch(offset), 12)
        size = size_of(response)
        # One batch more at most.
        assert size <= 41 * KB
        fetched += size
        offset = fetched // (10 * KB - 20)
    elapsed_s = (stage.world.clock.now_ms() - began_ms) / 1000
    # The quota, a burst, and the last response, which is not paid yet.
    assert 30 * KB * elapsed_s * 0.95 <= fetched <= 30 * KB * elapsed_s + 30 * KB + 41 * KB


def test_a_fetch_of_a_client_over_its_quota_is_answered_empty_and_gets_its_turn(stage: Stage) -> None:
    filled(stage)
    stage.set(CONSUMER_BYTE_RATE, 10 * KB, (("user", None),))
    first, second = stage.client("first"), stage.client("second")
    assert size_of(first.call(stage.fetch(0), 12))
    assert size_of(first.call(stage.fetch(1), 12))
    empty = second.call(stage.fetch(0), 12)
    assert empty.responses == [] and empty.error_code == 0 and empty.throttle_time_ms > 0
    # It waits, and is served then.
    assert size_of(second.call(stage.fetch(0), 12)) > 0


def test_fetches_that_wait_on_one_connection_get_one_burst_together(stage: Stage) -> None:
    """A client that sends many at once must not get many times its quota, when there are records for all."""
    stage.set(CONSUMER_BYTE_RATE, 10 * KB)
    reader = stage.client()
    for _ in range(60):
        reader.send(stage.fetch(0, max_wait_ms=20_000), 12)
    stage.world.run_for(100)
    assert reader.answers == []
    stage.admin.call(stage.produce(10 * KB), 9)
    stage.admin.call(stage.produce(10 * KB), 9)
    stage.world.run_for(15_000)
    read = sum(
        sum(len(part.records or b"") for topic in answer.responses for part in topic.partitions)
        for answer in reader.answers
    )
    assert 0 < read <= 10 * KB * 15 + 3 * 10 * KB
    assert len(reader.answers) == 60
    stage.throttling.check()


def test_a_session_goes_on_after_an_empty_answer(stage: Stage) -> None:
    filled(stage, 6)
    stage.set(CONSUMER_BYTE_RATE, 10 * KB, (("user", None),))
    greedy, reader = stage.client("greedy"), stage.client("reader")
    opened = reader.call(stage.fetch(6, (0, 0)), 12)
    assert opened.session_id
    greedy.call(stage.fetch(0), 12)
    greedy.call(stage.fetch(1), 12)
    # The quota is used up: the session takes the new offset, and answers nothing.
    empty = reader.call(stage.fetch(2, (opened.session_id, 1)), 12)
    assert (empty.session_id, empty.error_code, empty.responses) == (opened.session_id, 0, [])
    assert empty.throttle_time_ms > 0
    # The next request of the session names no partition, and gets what the last one asked for.
    request = stage.fetch(0, (opened.session_id, 2))
    request.topics = []
    data = reader.call(request, 12)
    assert (data.session_id, data.error_code) == (opened.session_id, 0)
    assert size_of(data) > 0


def test_a_first_fetch_over_the_quota_gets_no_session(stage: Stage) -> None:
    filled(stage, 6)
    stage.set(CONSUMER_BYTE_RATE, 10 * KB, (("user", None),))
    greedy, reader = stage.client("greedy"), stage.client("reader")
    greedy.call(stage.fetch(0), 12)
    greedy.call(stage.fetch(1), 12)
    empty = reader.call(stage.fetch(0, (0, 0)), 12)
    assert (empty.session_id, empty.responses) == (0, []) and empty.throttle_time_ms > 0
    opened = reader.call(stage.fetch(0, (0, 0)), 12)
    assert opened.session_id and size_of(opened)


def test_fifty_greedy_readers_share_fairly(stage: Stage) -> None:
    filled(stage, 20)
    stage.set(CONSUMER_BYTE_RATE, 100 * KB, (("user", None),))
    clients = [stage.client(f"greedy-{number}") for number in range(50)]
    request = stage.fetch(0)
    request.max_bytes = 10 * KB
    counts, seen = [0] * 50, [0] * 50
    begin_ms = stage.world.clock.now_ms()
    for client in clients:
        client.send(request, 12)
    for _ in range(60_000 // 10):
        stage.world.run_for(10)
        for number, client in enumerate(clients):
            while len(client.answers) > seen[number]:
                counts[number] += size_of(client.answers[seen[number]])
                seen[number] += 1
                client.send(request, 12)
    seconds = (stage.world.clock.now_ms() - begin_ms) / 1000
    assert sum(counts) == pytest.approx(100 * KB * seconds + 500 * KB, rel=0.1)
    assert max(counts) - min(counts) <= 25 * KB, counts


# Request time


def test_the_time_of_the_loop_is_charged(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.set(REQUEST_PERCENTAGE, 10.0)
    # Each look at the stopwatch is 25 ms later: every request takes this long.
    ticks = iter(range(0, 10**9, 25_000))
    monkeypatch.setattr(stage.world.clock, "work_us", lambda: next(ticks))
    client = stage.client()
    began_ms, served = stage.world.clock.now_ms(), 0
    while stage.world.clock.now_ms() - began_ms < 30_000:
        assert client.call(ApiVersionsRequest(), 4).throttle_time_ms <= 1_000
        served += 1
    assert served * 25 == pytest.approx(0.1 * 30_000, rel=0.1)


# Mutations


def topics(*names: str, partitions: int = 5) -> list[CreatableTopic]:
    return [CreatableTopic(name=name, num_partitions=partitions, replication_factor=1) for name in names]


def errors(results: Any) -> list[int]:
    return [result.error_code for result in results]


OVER = ErrorCode.THROTTLING_QUOTA_EXCEEDED


def test_topics_over_the_quota_are_refused_and_succeed_after_the_throttle_time(stage: Stage) -> None:
    stage.set(CONTROLLER_MUTATION_RATE, 1.0)
    client = stage.client()
    response = client.call(CreateTopicsRequest(topics=topics("a", "b", "c", "d")), 7)
    # A burst is 11 partitions, and the topic that uses it up is created.
    assert errors(response.topics) == [0, 0, 0, OVER]
    assert response.throttle_time_ms == pytest.approx(4_000, abs=20)
    assert response.topics[3].name == "d" and response.topics[3].error_message
    again = client.call(CreateTopicsRequest(topics=topics("d")), 7)
    assert errors(again.topics) == [0]


def test_a_dry_run_costs_nothing(stage: Stage) -> None:
    stage.set(CONTROLLER_MUTATION_RATE, 1.0)
    client = stage.client()
    for _ in range(5):
        dry = CreateTopicsRequest(topics=topics("a", partitions=10), validate_only=True)
        assert errors(client.call(dry, 7).topics) == [0]
    assert errors(client.call(CreateTopicsRequest(topics=topics("a", partitions=10)), 7).topics) == [0]


def test_deleting_and_growing_are_counted_too(stage: Stage) -> None:
    client = stage.client()
    client.call(CreateTopicsRequest(topics=topics("a", "b", partitions=12)), 7)
    stage.set(CONTROLLER_MUTATION_RATE, 1.0)
    named = DeleteTopicsRequest(topics=[DeleteTopicState(name="a"), DeleteTopicState(name="b")])
    assert errors(client.call(named, 6).responses) == [0, OVER]
    # After the throttle time it has a burst of nothing: the next request is served, and uses up more than there is.
    grown = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name="b", count=40, assignments=None)])
    assert errors(client.call(grown, 3).results) == [0]
    # The quota is that of the client id, on any connection.
    other = stage.client()
    refused = other.call(DeleteTopicsRequest(topic_names=["b"]), 5)
    assert errors(refused.responses) == [OVER]
    assert refused.throttle_time_ms > 20_000


def test_versions_without_the_error_are_carried_out_and_delayed(stage: Stage) -> None:
    stage.set(CONTROLLER_MUTATION_RATE, 1.0)
    client = stage.client()
    response = client.call(CreateTopicsRequest(topics=topics("a", "b", "c", "d")), 5)
    assert errors(response.topics) == [0, 0, 0, 0]
    assert response.throttle_time_ms == pytest.approx(9_000, abs=20)
    deleted_ms = stage.ms(lambda: client.call(DeleteTopicsRequest(topic_names=["a"]), 4))
    assert deleted_ms > 8_900
    assert errors(client.answers[-1].responses) == [0]


def test_topics_that_metadata_creates_are_counted_and_stay_unknown_over_the_quota(stage: Stage) -> None:
    stage.set(CONTROLLER_MUTATION_RATE, 0.1)
    client = stage.client()
    # A burst is one partition.
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=name) for name in ("a", "b", "c")])
    response = client.call(asked, 12)
    made = [topic.error_code == 0 for topic in response.topics]
    assert made == [True, True, False] and response.throttle_time_ms > 0
    assert response.topics[2].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    # The client asks again after the throttle time.
    assert [topic.error_code for topic in client.call(asked, 12).topics] == [0, 0, 0]


# Connection rate


def test_an_address_that_connects_too_often_waits_and_loses_no_connection(stage: Stage) -> None:
    stage.set(CONNECTION_CREATION_RATE, 2.0, (("ip", None),))
    greedy = [stage.world.client(peer="10.0.0.9") for _ in range(10)]
    other = stage.world.client(peer="10.0.0.8")
    assert stage.ms(lambda: other.call(ApiVersionsRequest(), 0)) < 10
    for client in greedy:
        client.send(ApiVersionsRequest(), 0)
    stage.world.run_for(10)
    assert sum(len(client.answers) for client in greedy) == 2
    stage.world.run_for(2_000)
    assert sum(len(client.answers) for client in greedy) == 6
    stage.world.run_for(3_000)
    assert [len(client.answers) for client in greedy] == [1] * 10


def test_an_address_that_goes_on_connecting_too_often_is_held_to_its_quota(stage: Stage) -> None:
    stage.set(CONNECTION_CREATION_RATE, 2.0, (("ip", None),))
    greedy = []
    for _ in range(100):
        greedy += [stage.world.client(peer="10.0.0.9") for _ in range(10)]
        for client in greedy[-10:]:
            if not client.is_closed:
                client.send(ApiVersionsRequest(), 0)
        stage.world.run_for(1_000)
    served = sum(len(client.answers) for client in greedy)
    assert 190 <= served <= 210
    server = stage.world.node.client
    assert server is not None
    stage.world.run_for(30_000)
    open_now = sum(not client.is_closed for client in greedy)
    assert server._per_host["10.0.0.9"] == open_now == sum(len(client.answers) for client in greedy)
    stage.throttling.check()


def test_connections_that_wait_count_for_the_limits_and_end_with_the_server(stage: Stage) -> None:
    stage = Stage({"max.connections.per.ip": "4"})
    stage.set(CONNECTION_CREATION_RATE, 1.0, (("ip", "10.0.0.9"),))
    greedy = [stage.world.client(peer="10.0.0.9") for _ in range(10)]
    assert [client.is_closed for client in greedy] == [False] * 4 + [True] * 6
    server = stage.world.node.client
    assert server is not None
    server.close()
    assert all(client.is_closed for client in greedy)
    stage.world.run_for(30_000)


# Memory


def test_invented_client_ids_use_limited_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BUCKETS_MAX", 20)
    stage.set(PRODUCER_BYTE_RATE, 10 * KB)
    for number in range(60):
        client = stage.client(f"invented-{number}")
        client.call(stage.produce(2 * KB), 9)
        client.stream.close()
    assert len(stage.throttling.quotas) == 20
    stage.throttling.check()
