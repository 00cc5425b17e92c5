"""One connection: order, back-pressure, timeouts, limits, and the handshake."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from penstock.broker.network.connection import UNSENT_BYTES_MAX, WAITING, Call
from penstock.protocol.apis import API_VERSIONS, APIS, CLIENT, advertised
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.topics import MetadataRequest
from tests.broker.conftest import Node
from tests.broker.memory import MEGABYTE, forget_peak, peak_bytes, resident_bytes
from tests.broker.phrases import (
    batch,
    create_topic,
    fetch_request,
    handshake,
    only,
    produce,
    produce_request,
    put,
    values,
)
from tests.broker.stage import Stage
from tests.broker.wire import Closed, Wire, encode_request, frame, header
from tests.support import BrokerProcess, wait_until

Unique = Callable[[str], str]

HANDSHAKE = encode_request(ApiVersionsRequest(), 0)


# The handshake


@pytest.mark.parametrize("version", range(5))
def test_every_version_of_the_handshake_lists_what_is_served(wire: Wire, version: int) -> None:
    request = ApiVersionsRequest(client_software_name="tests", client_software_version="1.0")
    response = wire.call(request, version)
    assert response.error_code == 0
    told = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
    assert told == {api.key: (api.advertised_min, api.version_max_on(CLIENT)) for api in advertised(CLIENT)}
    # librdkafka before 2.11 takes a higher minimum for "cannot compress".
    assert told[0][0] == 0


def test_the_answer_to_the_handshake_has_the_oldest_header(wire: Wire) -> None:
    request = ApiVersionsRequest(client_software_name="tests", client_software_version="1")
    wire.send_bytes(encode_request(request, 3, correlation_id=77))
    content = wire.receive_frame()
    # Correlation id, then at once the error code: no tag section between them.
    assert struct.unpack_from(">ih", content) == (77, 0)
    assert content[6] == len(advertised(CLIENT)) + 1


@pytest.mark.parametrize("version", [5, 6, 99, 32767, -1, -32768])
def test_an_unknown_version_of_the_handshake_is_answered_in_version_zero(wire: Wire, version: int) -> None:
    wire.send_bytes(frame(struct.pack(">hhih", API_VERSIONS, version, 5, -1) + b"\0\xff rubbish"))
    content = wire.receive_frame()
    correlation_id, error, count, key, low, high = struct.unpack(">ihihhh", content)
    assert (correlation_id, error) == (5, ErrorCode.UNSUPPORTED_VERSION)
    assert (count, key, low, high) == (1, API_VERSIONS, 0, 4)
    # And the connection goes on.
    assert handshake(wire) == len(advertised(CLIENT))


@pytest.mark.parametrize(
    "name", ["", " ", "-", "a b", "a\nb", "ü", "x" * 100_000 + "!"], ids=lambda name: name[:8]
)
def test_software_names_that_are_none_are_refused(wire: Wire, name: str) -> None:
    request = ApiVersionsRequest(client_software_name=name, client_software_version="1")
    assert wire.call(request, 3).error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("key", [-1, 4, 5, 6, 7, 34, 38, 52, 53, 56, 59, 62, 63, 67, 9999, -32768])
def test_apis_that_are_not_served_close_the_connection(wire: Wire, key: int) -> None:
    assert key not in [api.key for api in advertised(CLIENT)]
    wire.send_bytes(frame(struct.pack(">hhih", key, 0, 1, -1) + bytes(64)))
    assert wire.is_closed()


@pytest.mark.parametrize("key", sorted(APIS))
def test_versions_that_are_not_served_close_the_connection(node: Node, key: int) -> None:
    api = APIS[key]
    if key == API_VERSIONS:
        return
    for version in (api.version_min - 1, api.version_max + 1, -1, 32767, -32768):
        with node.connect() as wire:
            wire.send_bytes(frame(struct.pack(">hhih", key, version, 1, -1) + bytes(64)))
            assert wire.is_closed(), version


# Order


def test_answers_come_in_the_order_of_the_requests(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    wire.send(fetch_request(name, 0, max_wait_ms=300), 12)
    for number in range(20):
        wire.send(ApiVersionsRequest(), 2)
        wire.send(produce_request(name, batch(b"%d" % number)), 9)
        wire.send(MetadataRequest(topics=[]), 9)
    # The fetch is answered by what was produced behind it, and before it.
    data = only(only(wire.receive().responses).partitions)
    assert values(data.records)[0] == b"0"
    for number in range(20):
        assert wire.receive().error_code == 0
        assert only(only(wire.receive().responses).partition_responses).base_offset == number
        assert wire.receive().topics == []


def test_what_waits_behind_a_long_poll_is_answered_after_it(node: Node, wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    wire.send(fetch_request(name, 0, max_wait_ms=600_000), 12)
    wire.send(ApiVersionsRequest(), 2)
    assert wire.is_silent(0.2)
    with node.connect() as other:
        put(other, name, b"v")
    assert only(wire.receive().responses).topic == name
    assert wire.receive().error_code == 0


def test_more_requests_than_may_wait_are_all_answered_in_order(wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    for _ in range(200):
        wire.send(fetch_request(name, 0, max_wait_ms=150), 12)
    # They wait side by side, 64 at a time; the rest is not even read.
    begin = time.monotonic()
    for _ in range(200):
        assert only(wire.receive().responses).topic == name
    assert time.monotonic() - begin < 10


def test_a_hundred_thousand_requests_at_once_are_all_answered(node: Node) -> None:
    count = 100_000
    requests = b"".join(
        frame(header(APIS[API_VERSIONS], 0, correlation_id, None)) for correlation_id in range(count)
    )
    forget_peak(node.pid)
    before = resident_bytes(node.pid)
    with node.connect() as wire:
        sender = threading.Thread(target=wire.socket.sendall, args=(requests,))
        sender.start()
        size = len(wire.receive_frame())
        for correlation_id in range(1, count):
            content = wire.receive_frame()
            assert len(content) == size
            assert int.from_bytes(content[:4], "big") == correlation_id
        sender.join()
    assert peak_bytes(node.pid) - before < 48 * MEGABYTE


def test_a_hundred_thousand_requests_whose_answers_nobody_reads_cost_little(node: Node) -> None:
    requests = b"".join(frame(header(APIS[API_VERSIONS], 0, n, None)) for n in range(100_000))
    forget_peak(node.pid)
    before = resident_bytes(node.pid)
    with node.connect(receive_buffer=4096) as silent, node.connect() as other:
        silent.socket.settimeout(1)
        with contextlib.suppress(TimeoutError):
            silent.socket.sendall(requests)
        for _ in range(50):
            assert handshake(other) > 0
    assert peak_bytes(node.pid) - before < 32 * MEGABYTE


# Back-pressure


def test_a_slow_reader_costs_little_and_is_served_completely(node: Node, wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    for number in range(32):
        put(wire, name, b"%02d" % number + b"x" * 1_000_000)
    forget_peak(node.pid)
    before = resident_bytes(node.pid)
    with node.connect(receive_buffer=64 * 1024) as slow:
        # Sixty-four answers of sixteen megabytes each: a gigabyte, not read.
        for _ in range(64):
            slow.send(fetch_request(name, 0, max_bytes=16_500_000), 12)
        for _ in range(20):
            assert handshake(wire) > 0
            time.sleep(0.02)
        assert peak_bytes(node.pid) - before < 24 * MEGABYTE
        for _ in range(64):
            data = only(only(slow.receive().responses).partitions)
            assert len(data.records) > 16_000_000
            assert bytes(data.records[-1000:]) == b"x" * 999 + b"\0"
        assert peak_bytes(node.pid) - before < 24 * MEGABYTE
        assert handshake(slow) > 0


def test_a_reader_that_stops_and_goes_on_gets_every_byte(node: Node, wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    sent = [b"%04d" % number + b"y" * 200_000 for number in range(10)]
    for value in sent:
        put(wire, name, value)
    with node.connect(receive_buffer=8192) as slow:
        for _ in range(3):
            slow.send(fetch_request(name, 0), 12)
            time.sleep(0.05)
        for _ in range(3):
            assert values(only(only(slow.receive().responses).partitions).records) == sent


def test_a_connection_that_does_not_read_its_answers_is_not_read_either() -> None:
    stage = Stage()
    stream = stage.connect()
    stream.room = 0
    for _ in range(10_000):
        if not stream.is_read:
            break
        stream.arrive(HANDSHAKE * 100)
        stage.spawn.run()
    assert not stream.is_read
    stream.take(1 << 30)
    stage.spawn.run()
    answer_bytes = len(stream.sent)
    assert UNSENT_BYTES_MAX < answer_bytes < 2 * UNSENT_BYTES_MAX
    assert stream.is_read and not stream.is_closed


def test_more_large_requests_at_once_than_fit_are_all_served(unique: Unique) -> None:
    limits = {"socket.request.max.bytes": str(8 << 20), "queued.max.request.bytes": str(16 << 20)}
    with BrokerProcess(limits) as process:
        address = process.host, process.port
        name = unique("t")
        with Wire(address) as wire:
            create_topic(wire, name, configs={"max.message.bytes": str(8 << 20)})
        large = batch(b"x" * (7 << 20))
        errors: list[object] = []

        def produce_one() -> None:
            try:
                with Wire(address, timeout_s=60) as wire:
                    errors.append(produce(wire, name, large).error_code)
            except Exception as error:
                errors.append(error)

        # Each of them needs half of all that may be lent, and holds on to what it has.
        producers = [threading.Thread(target=produce_one) for _ in range(12)]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join()
        if errors != [0] * 12:
            process.kill()
        assert errors == [0] * 12


# Timeouts


def test_an_idle_connection_is_closed() -> None:
    stage = Stage(connections_max_idle_ms="30000")
    idle, busy = stage.connect(), stage.connect()
    for _ in range(10):
        stage.pass_time(10)
        busy.arrive(HANDSHAKE)
    assert idle.is_closed
    assert not busy.is_closed


def test_connections_may_idle_for_ever_when_told_so() -> None:
    stage = Stage(connections_max_idle_ms="-1")
    idle = stage.connect()
    stage.pass_time(100_000, step_s=100)
    assert not idle.is_closed


def test_a_request_that_never_ends_is_given_up() -> None:
    stage = Stage()
    dripping = stage.connect()
    dripping.arrive(struct.pack(">i", 1000))
    for _ in range(100):
        stage.pass_time(1)
        if dripping.is_closed:
            break
        dripping.arrive(b"\0")
    assert dripping.is_closed
    assert stage.refused == ["a request that did not arrive in time"]


def test_a_request_of_less_than_a_length_that_never_ends_is_given_up() -> None:
    stage = Stage()
    silent = stage.connect()
    silent.arrive(b"\0")
    stage.pass_time(100)
    assert silent.is_closed


def test_a_busy_connection_whose_reads_end_inside_requests_is_not_given_up() -> None:
    stage = Stage()
    busy = stage.connect()
    half = len(HANDSHAKE) // 2
    busy.arrive(HANDSHAKE[:half])
    for _ in range(200):
        stage.pass_time(1)
        # The end of one request and the beginning of the next, for minutes.
        busy.arrive(HANDSHAKE[half:] + HANDSHAKE[:half])
        assert not busy.is_closed
    assert busy.sent.count(HANDSHAKE[8:12]) >= 200


def waiting_route(stage: Stage) -> list[Call]:
    """Leave every handshake of version 0 without an answer; the list of those that wait."""
    calls: list[Call] = []

    def wait(broker: object, request: object, call: Call) -> object:
        calls.append(call)
        return WAITING

    route = stage.server.route(API_VERSIONS, 0)
    assert route is not None
    route.handle = wait
    return calls


def test_a_request_that_waits_for_its_answer_is_not_silence() -> None:
    stage = Stage(connections_max_idle_ms="30000")
    calls = waiting_route(stage)
    polling = stage.connect()
    polling.arrive(HANDSHAKE)
    stage.pass_time(300)
    assert not polling.is_closed
    calls[0].answer(ApiVersionsResponse())
    assert polling.sent
    stage.pass_time(60)
    assert polling.is_closed


def test_an_answer_that_cannot_be_written_closes_its_connection_only() -> None:
    stage = Stage()
    calls = waiting_route(stage)
    mine, other = stage.connect(), stage.connect()
    mine.arrive(HANDSHAKE)
    # A mistake of ours; whoever completes the request, a disk thread's callback perhaps, must not fall with it.
    calls[0].answer(ApiVersionsResponse(api_keys=[ApiVersion(api_key=10**9)]))
    assert mine.is_closed
    other.arrive(encode_request(ApiVersionsRequest(), 1))
    assert other.sent


def test_who_sits_on_memory_that_others_wait_for_has_to_go_on_sending() -> None:
    stage = Stage(socket_request_max_bytes=str(1 << 20), queued_max_request_bytes=str(1 << 20))
    begun = struct.pack(">i", 1 << 20) + header(APIS[0], 9) + bytes(900_000)
    silent, large, small = stage.connect(), stage.connect(), stage.connect()
    silent.arrive(begun)
    # A request that does not come in one piece, and so needs memory of its own.
    large.arrive(frame(HANDSHAKE[4:] + bytes(500_000))[:400_000])
    large.arrive(frame(HANDSHAKE[4:] + bytes(500_000))[400_000:])
    assert not large.sent
    # Who needs none is served all the while.
    small.arrive(HANDSHAKE)
    assert small.sent
    stage.pass_time(12)
    assert silent.is_closed
    assert large.sent and not large.is_closed


# Limits


def test_connections_beyond_the_limit_are_refused_and_the_others_stay() -> None:
    with BrokerProcess({"max.connections": "5"}) as process:
        address = process.host, process.port
        kept = [Wire(address) for _ in range(5)]
        for wire in kept:
            assert handshake(wire) > 0
        for _ in range(10):
            with Wire(address) as refused:
                assert refused.is_closed()
        for wire in kept:
            assert handshake(wire) > 0
        kept.pop().close()

        def there_is_room() -> bool:
            try:
                with Wire(address) as wire:
                    return handshake(wire) > 0
            except (Closed, ConnectionError):
                return False

        wait_until(there_is_room, 5, "a place after one has left")
        for wire in kept:
            wire.close()
        wait_until(there_is_room, 5, "room after all have left")


@pytest.mark.parametrize("name", ["max.connections", "max.connections.per.ip"])
def test_the_limit_of_connections_is_changed_while_the_broker_runs(name: str) -> None:
    def change(wire: Wire, broker: str, operation: int, value: str | None) -> None:
        resource = IncrementalAlterConfigsResource(
            resource_type=4,
            resource_name=broker,
            configs=[IncrementalAlterableConfig(name=name, config_operation=operation, value=value)],
        )
        (result,) = wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses
        assert result.error_code == 0, result.error_message

    with BrokerProcess() as process:
        address = process.host, process.port
        with Wire(address) as wire:
            change(wire, "", 0, "1")
            with Wire(address) as refused:
                assert refused.is_closed()
            # What is set for this broker counts before what is set for all.
            change(wire, "1", 0, "2")
            with Wire(address) as second:
                assert handshake(second) > 0
                with Wire(address) as third:
                    assert third.is_closed()
            change(wire, "1", 1, None)
            change(wire, "", 1, None)
            with Wire(address) as second, Wire(address) as third:
                assert handshake(second) == handshake(third) > 0


def test_connections_of_one_address_are_limited() -> None:
    stage = Stage(max_connections_per_ip="2")
    mine = [stage.connect("10.0.0.1") for _ in range(4)]
    assert [stream.is_closed for stream in mine] == [False, False, True, True]
    theirs = [stage.connect("10.0.0.2") for _ in range(3)]
    assert [stream.is_closed for stream in theirs] == [False, False, True]
    mine[0].arrive(b"\0\0\0\1")
    assert mine[0].is_closed
    assert not stage.connect("10.0.0.1").is_closed
    assert stage.connect("10.0.0.1").is_closed


def test_a_connection_that_is_reset_does_no_harm(node: Node, wire: Wire, unique: Unique) -> None:
    name = unique("t")
    create_topic(wire, name)
    put(wire, name, b"x" * 1_000_000)
    for _ in range(20):
        with node.connect() as leaving:
            leaving.send(fetch_request(name, 0), 12)
            leaving.send(fetch_request(name, 1, max_wait_ms=60_000), 12)
            # A reset instead of an orderly end.
            leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert handshake(wire) > 0
