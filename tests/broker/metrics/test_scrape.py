"""What the metrics of a broker say after known work."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from penstock.broker.metrics import families
from penstock.broker.metrics.census import PARTITIONS_PER_SLICE, CensusTaker
from penstock.broker.metrics.scrape import SAMPLES_PER_SLICE
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.produce import InitProducerIdRequest
from penstock.protocol.messages.quotas import AlterClientQuotasRequest, QuotaAlteration, QuotaOp
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest
from penstock.protocol.messages.transactions import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from penstock.protocol.records import Record, encode_batch
from tests.broker.metrics.scraping import ADDRESS, Http, samples, scrape
from tests.broker.test_virtual_time import create, fetch_request, produce_request
from tests.virtual import Client, World


@pytest.fixture
def world() -> World:
    return World(metrics=ADDRESS)


def create_many(client: Client, count: int, partitions: int = 1) -> None:
    topics = [
        CreatableTopic(name=f"topic-{number:05}", num_partitions=partitions, replication_factor=1)
        for number in range(count)
    ]
    response = client.call(CreateTopicsRequest(topics=topics), 7)
    assert not any(topic.error_code for topic in response.topics)


def initialized(world: World, client: Client, transactional_id: str | None) -> Any:
    """A producer id and epoch, as soon as the broker has them."""
    answers: list[Any] = []

    def has_one() -> bool:
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        answers.append(client.call(request, 4))
        return not answers[-1].error_code

    world.run_until(has_one, 60_000)
    return answers[-1]


def test_a_new_broker_is_ready_leads_the_quorum_and_has_done_nothing(world: World) -> None:
    found = scrape(world)
    assert found["penstock_ready"] == 1
    assert found["penstock_active_controller"] == found["penstock_quorum_leader_id"] == 1
    assert found["penstock_cluster_brokers{state=active}"] == 1
    assert found["penstock_metadata_lag_records"] == 0
    assert found["penstock_replicas"] == found["penstock_offline_partitions"] == 0
    assert found["penstock_build_info{node_id=1,version=0.1.0}"] == 1
    assert not any("topic=" in name for name in found)


def test_every_metric_has_a_meaning_and_a_type_once_however_many_topics_there_are(world: World) -> None:
    client = world.client()
    create_many(client, 250)
    text = Http(world).get("/metrics").body.decode()
    helped = Counter(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    typed = Counter(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.MULTILINE))
    assert helped == typed and set(helped.values()) == {1}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = re.match(r"\w+", line)
            assert name is not None
            assert name[0] in typed or re.sub("_(bucket|sum|count)$", "", name[0]) in typed, line
    found = samples(text.encode())
    assert sum(name.startswith("penstock_topic_in_bytes_total") for name in found) == 250
    assert found["penstock_topic_in_bytes_total{topic=topic-00249}"] == 0


def test_names_say_what_they_are_and_end_with_their_unit(world: World) -> None:
    text = Http(world).get("/metrics").body.decode()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert re.fullmatch("penstock(_[a-z]+)+", name), name
        assert (kind == "counter") == name.endswith("_total"), name
        if kind == "histogram":
            assert name.endswith("_seconds"), name


def test_records_and_bytes_are_counted_by_topic(world: World) -> None:
    client = world.client()
    create(client, "events")
    create(client, "others")
    request = produce_request(world, "events", b"a", b"b", b"c")
    size = len(request.topic_data[0].partition_data[0].records or b"")
    client.call(request, 9)
    client.call(fetch_request("events", 0, max_wait_ms=0), 12)
    client.call(fetch_request("events", 0, max_wait_ms=0), 12)
    found = scrape(world)
    assert found["penstock_topic_in_messages_total{topic=events}"] == 3
    assert found["penstock_topic_in_bytes_total{topic=events}"] == size
    assert found["penstock_topic_out_messages_total{topic=events}"] == 6
    assert found["penstock_topic_out_bytes_total{topic=events}"] == 2 * size
    assert found["penstock_log_size_bytes{topic=events}"] == size
    assert found["penstock_topic_replication_out_bytes_total{topic=events}"] == 0
    for name in ("in_messages", "in_bytes", "out_messages", "out_bytes"):
        assert found[f"penstock_topic_{name}_total{{topic=others}}"] == 0
    assert found["penstock_replicas"] == found["penstock_leaders"] == 2


def test_a_batch_that_is_sent_again_is_counted_once(world: World) -> None:
    client = world.client()
    create(client, "events")
    ids = initialized(world, client, None)
    request = produce_request(world, "events", b"a")
    batch = encode_batch(
        [Record(0, world.clock.wall_ms(), None, b"a", ())],
        producer_id=ids.producer_id,
        producer_epoch=ids.producer_epoch,
        base_sequence=0,
    )
    for _ in range(2):
        request.topic_data[0].partition_data[0].records = memoryview(bytearray(batch))
        client.call(request, 9)
    assert scrape(world)["penstock_topic_in_messages_total{topic=events}"] == 1


def test_a_deleted_topic_has_no_series_and_one_of_the_same_name_begins_at_zero(world: World) -> None:
    client = world.client()
    create(client, "events")
    world.broker.partitions.traffic_of("events").messages_in = 5
    assert scrape(world)["penstock_topic_in_messages_total{topic=events}"] == 5
    client.call(DeleteTopicsRequest(topic_names=["events"], timeout_ms=1_000), 5)
    assert not any("topic=events" in name for name in scrape(world))
    create(client, "events")
    assert scrape(world)["penstock_topic_in_messages_total{topic=events}"] == 0


def test_requests_are_counted_by_api_with_their_time(world: World) -> None:
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"a"), 9)
    client.call(fetch_request("events", 1, max_wait_ms=5_000), 12)
    found = scrape(world)
    assert found["penstock_request_seconds_count{api=Produce,server=client}"] == 1
    assert found["penstock_request_seconds_bucket{api=Produce,le=0.5,server=client}"] == 1
    # It has waited for data.
    assert found["penstock_request_seconds_count{api=Fetch,server=client}"] == 1
    assert found["penstock_request_seconds_sum{api=Fetch,server=client}"] == pytest.approx(5, abs=0.01)
    assert found["penstock_request_seconds_bucket{api=Fetch,le=2.0,server=client}"] == 0
    assert found["penstock_request_seconds_bucket{api=Fetch,le=10.0,server=client}"] == 1
    assert found["penstock_request_seconds_bucket{api=Fetch,le=+Inf,server=client}"] == 1


def test_errors_are_counted_by_api_and_name_whether_a_handler_counts_them_or_not(world: World) -> None:
    client = world.client()
    client.call(produce_request(world, "nothing", b"a"), 9)
    client.call(fetch_request("nothing", 0, max_wait_ms=0), 12)
    client.call(DeleteTopicsRequest(topic_names=["nothing"], timeout_ms=1_000), 5)
    unknown = "error=UNKNOWN_TOPIC_OR_PARTITION,server=client"
    found = scrape(world)
    for api in ("Produce", "Fetch", "DeleteTopics"):
        assert found[f"penstock_request_errors_total{{api={api},{unknown}}}"] == 1, api


def test_requests_that_wait_are_shown_until_they_are_answered_or_their_client_leaves(world: World) -> None:
    client, leaving = world.client(), world.client()
    create(client, "events")
    for each in (client, leaving):
        each.send(fetch_request("events", 0, max_wait_ms=60_000), 12)
    assert scrape(world)["penstock_waiting_requests{api=Fetch}"] == 2
    leaving.stream.close()
    assert scrape(world)["penstock_waiting_requests{api=Fetch}"] == 1
    world.client().call(produce_request(world, "events", b"a"), 9)
    world.run_until(lambda: bool(client.answers[1:]), 1_000)
    assert scrape(world)["penstock_waiting_requests{api=Fetch}"] == 0


def test_a_produce_that_waits_for_its_flush_is_shown(world: World) -> None:
    client = world.client()
    create(client, "events", flush_messages="1")
    before = scrape(world)["penstock_fsync_seconds_count{log=data}"]
    waiting = world.broker.waiting_requests
    client.send(produce_request(world, "events", b"a"), 9)
    world.run_until(lambda: waiting.produces == 1, 1_000)
    world.run_until(lambda: len(client.answers) == 2, 1_000)
    found = scrape(world)
    assert found["penstock_waiting_requests{api=Produce}"] == 0
    assert found["penstock_fsync_seconds_count{log=data}"] == before + 1
    assert found["penstock_fsync_seconds_count{log=metadata}"] > 0


def test_connections_are_counted_by_listener(world: World) -> None:
    clients = [world.client() for _ in range(3)]
    found = scrape(world)
    assert found["penstock_connections{listener=PLAINTEXT}"] == 3
    clients[0].stream.close()
    world.run_for(1)
    found = scrape(world)
    assert found["penstock_connections{listener=PLAINTEXT}"] == 2
    assert found["penstock_connections_accepted_total{listener=PLAINTEXT}"] == 3


def test_connections_over_the_limit_are_counted() -> None:
    world = World({"max.connections": "1"}, metrics=ADDRESS)
    for _ in range(3):
        world.client()
    assert scrape(world)["penstock_connections_refused_total{server=client}"] == 2


def test_clients_over_their_quota_are_shown(world: World) -> None:
    client = world.client()
    create(client, "events")
    quota = QuotaAlteration(
        entity=[QuotaEntityPart(entity_type="client-id", entity_name="test")],
        ops=[QuotaOp(key="producer_byte_rate", value=10.0)],
    )
    client.call(AlterClientQuotasRequest(entries=[quota]), 1)
    client.call(produce_request(world, "events", b"x" * 100), 9)
    found = scrape(world)
    assert found["penstock_throttled_connections"] == found["penstock_throttles_total"] == 1
    world.run_for(30_000)
    found = scrape(world)
    assert (found["penstock_throttled_connections"], found["penstock_throttles_total"]) == (0, 1)


def test_open_transactions_are_counted_by_their_state(world: World) -> None:
    client = world.client()
    create(client, "events")

    def has_coordinator() -> bool:
        answer = client.call(FindCoordinatorRequest(key_type=1, coordinator_keys=["mover"]), 4)
        return bool(answer.coordinators[0].error_code == 0)

    world.run_until(has_coordinator, 60_000)
    ids = initialized(world, client, "mover")
    assert scrape(world)["penstock_open_transactions{state=Ongoing}"] == 0
    answer = client.call(
        AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="mover",
            v3_and_below_producer_id=ids.producer_id,
            v3_and_below_producer_epoch=ids.producer_epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="events", partitions=[0])],
        ),
        3,
    )
    assert answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
    assert scrape(world)["penstock_open_transactions{state=Ongoing}"] == 1


def test_the_sizes_of_logs_that_are_not_open_are_known_after_a_restart(world: World) -> None:
    client = world.client()
    create(client, "events")
    client.call(produce_request(world, "events", b"a"), 9)
    size = scrape(world)["penstock_log_size_bytes{topic=events}"]
    assert size > 0
    world.node.close()
    after = World(files=world.files, metrics=ADDRESS)
    hosted = after.broker.partitions.get("events", 0)
    assert hosted is not None and not hosted.is_open
    assert scrape(after)["penstock_log_size_bytes{topic=events}"] == size
    assert not hosted.is_open
    after.client().call(produce_request(after, "events", b"a"), 9)
    assert scrape(after)["penstock_log_size_bytes{topic=events}"] == 2 * size


def test_more_topics_than_have_series_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "TOPICS_MAX", 3)
    create_many(world.client(), 5)
    found = scrape(world)
    assert found["penstock_topics_left_out"] == 2
    assert {name for name in found if name.startswith("penstock_log_size_bytes")} == {
        f"penstock_log_size_bytes{{topic=topic-0000{number}}}" for number in range(3)
    }


def test_no_turn_of_the_loop_works_on_more_than_a_slice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text and the census of many topics are made in slices, and who asks meanwhile gets the same text."""
    create_many(world.client(), 300, partitions=5)
    turns: list[int] = []
    soon = world.spawn.soon

    def counting(callback: Any) -> None:
        turns.append(1)
        soon(callback)

    monkeypatch.setattr(world.spawn, "soon", counting)
    first, second = Http(world), Http(world)
    first.ask("/metrics")
    second.ask("/metrics")
    text = first.answer().body
    lines = text.count(b"\n")
    assert lines > 7 * 300
    # A piece is whole, so a slice may be longer by one; and what the connections need.
    assert (
        len(turns) >= lines // (SAMPLES_PER_SLICE + families.TOPICS_PER_PIECE) + 1_500 // PARTITIONS_PER_SLICE
    )
    assert second.answer().body == text


def test_a_census_that_took_long_is_used_again_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()
    create(client, "events")
    taker = CensusTaker(world.broker)
    found: list[Any] = []
    real = world.clock.work_us
    # Every look at the clock is 5 ms later than the one before.
    ticks = iter(range(0, 10**9, 5_000))
    monkeypatch.setattr(world.clock, "work_us", lambda: real() + next(ticks))
    taker.take(found.append)
    world.run_until(lambda: len(found) == 1, 1_000)
    taker.take(found.append)
    assert found[1] is found[0]
    world.run_for(10_000)
    taker.take(found.append)
    world.run_until(lambda: len(found) == 3, 1_000)
    assert found[2] is not found[0]


def test_the_lag_of_the_loop_is_looked_at_five_times_a_second(world: World) -> None:
    before = scrape(world)["penstock_loop_lag_seconds_count"]
    world.run_for(10_000)
    after = scrape(world)
    assert after["penstock_loop_lag_seconds_count"] - before == pytest.approx(50, abs=1)
    world.clock.advance(700)  # the loop does something else
    world.run_for(1)
    assert scrape(world)["penstock_loop_lag_seconds_sum"] - after["penstock_loop_lag_seconds_sum"] >= 0.5
