"""The blocking client against a real broker. With PENSTOCK_TEST_BOOTSTRAP also against Apache Kafka."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.records import batches, decode_records, encode_batch
from penstock.wire import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    BatchTooLarge,
    BrokerRefused,
    Client,
    OffsetOutOfRange,
    Producer,
    TimedOut,
    UnknownTopic,
    Unreachable,
    WireError,
    admin,
    links,
    operations,
    shared,
)
from tests.support import wait_until

TIME_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def client(bootstrap: str) -> Iterator[Client]:
    with Client(bootstrap) as client:
        yield client


@pytest.fixture
def topic(client: Client, unique: Callable[[str], str]) -> str:
    name = unique("wire")
    assert client.create_topic(name, 2, configs={"retention.ms": "-1"})
    return name


def batch_of(numbers: range, size: int = 100) -> bytearray:
    return encode_batch(
        [(TIME_MS + number, b"%d" % number, bytes([number % 256]) * size, ()) for number in numbers]
    )


def write(
    client: Client, at: TopicPartition, count: int, *, batch_records: int = 100, size: int = 100
) -> None:
    with Producer(client) as producer:
        for first in range(0, count, batch_records):
            producer.send(at, batch_of(range(first, min(count, first + batch_records)), size))


def keys(records: memoryview, start: int, end: int) -> list[int]:
    return [
        int(record.key or b"")
        for position, _ in batches(records)
        for record in decode_records(records, position, bytes_max=1 << 30)
        if start <= record.offset < end
    ]


# Topics


def test_a_topic_is_made_once_and_described(client: Client, topic: str) -> None:
    assert client.create_topic(topic, 2) is False
    info = client.topics([topic, "there-is-no-such-topic"])
    assert list(info) == [topic]
    assert sorted(info[topic].partitions) == [0, 1]
    assert info[topic].topic_id != bytes(16)
    assert not info[topic].is_internal
    assert topic in client.topics()
    assert client.topics([]) == {}


def test_only_who_asks_for_it_has_a_topic_made(client: Client, unique: Callable[[str], str]) -> None:
    name = unique("wire")
    assert client.topics([name]) == {}
    wait_until(
        lambda: client.topics([name], create=True), 30, "brokers make a topic that a producer asks for"
    )
    assert sorted(client.topics([name])) == [name]


def test_settings_of_a_topic_include_the_defaults(client: Client, topic: str) -> None:
    configs = client.topic_configs([topic])[topic]
    assert configs["retention.ms"] == "-1"
    assert configs["cleanup.policy"] == "delete"


def test_a_topic_that_cannot_be_made_says_why(client: Client, unique: Callable[[str], str]) -> None:
    with pytest.raises(BrokerRefused, match="cannot create topic"):
        client.create_topic(unique("wire"), 1, configs={"retention.ms": "a week"})
    with pytest.raises(BrokerRefused, match="cannot create topic"):
        client.create_topic(unique("wire"), 1, 99)


def test_an_unknown_topic_is_an_error_everywhere(
    client: Client, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (operations, admin):
        monkeypatch.setattr(module, "UNKNOWN_TOPIC_MS", 200)
    at = TopicPartition(unique("nothing"), 0)
    with pytest.raises(UnknownTopic, match=at.topic):
        client.fetch(at, 0)
    with pytest.raises(UnknownTopic, match=at.topic):
        client.topic_configs([at.topic])
    assert at.topic not in client.topics()


# Reading


def test_what_was_produced_is_fetched(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 1)
    write(client, at, 1000)
    fetched = client.fetch(at, 250)
    assert keys(fetched.records, 250, 1000) == list(range(250, 1000))
    assert (fetched.high_watermark, fetched.last_stable_offset, fetched.log_start_offset) == (1000, 1000, 0)
    assert fetched.next_offset == 1000
    assert fetched.aborted == []


def test_a_fetch_at_the_end_waits_and_comes_back_empty(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    fetched = client.fetch(at, 0, wait_ms=50)
    assert (len(fetched.records), fetched.next_offset, fetched.high_watermark) == (0, 0, 0)


@pytest.mark.parametrize("bytes_max", [1, 5_000, 1 << 23])
def test_a_reader_reads_all_of_a_range(client: Client, topic: str, bytes_max: int) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 3000)
    seen = []
    for fetched in client.reader(at, 123, 2345, bytes_max=bytes_max):
        seen += keys(fetched.records, 123, 2345)
    assert seen == list(range(123, 2345))
    assert list(client.reader(at, 10, 10)) == []


def test_views_stay_good_while_they_are_kept(client: Client, topic: str) -> None:
    """The next answer is received while the caller has this one, and never into its buffer."""
    at = TopicPartition(topic, 0)
    write(client, at, 5000, size=1000)
    kept = [fetched.records for fetched in client.reader(at, 0, 5000, bytes_max=500_000)]
    assert len(kept) > 5
    assert [key for records in kept for key in keys(records, 0, 5000)] == list(range(5000))


def test_buffers_are_used_again(bootstrap: str, client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 3000, size=1000)
    with Client(bootstrap) as fresh:
        for _ in range(4):
            sizes = [len(fetched.records) for fetched in fresh.reader(at, 0, 3000, bytes_max=400_000)]
            assert sum(sizes) > 3_000_000
        assert len(fresh.shell.core.links._buffers._kept) <= 3


def test_a_reader_left_in_the_middle_disturbs_nobody(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 1000)
    for _ in range(3):
        reader = client.reader(at, 0, 1000, bytes_max=1000)
        next(reader)
        reader.close()  # type: ignore[attr-defined]
    assert client.fetch(at, 999).next_offset == 1000


def test_two_readers_and_other_questions_take_turns(client: Client, topic: str) -> None:
    places = [TopicPartition(topic, number) for number in range(2)]
    for at in places:
        write(client, at, 500)
    readers = [client.reader(at, 0, 500, bytes_max=2000) for at in places]
    seen: list[list[int]] = [[], []]
    for pair in zip(*readers, strict=True):
        for place, fetched in enumerate(pair):
            seen[place] += keys(fetched.records, 0, 500)
        assert client.list_offsets(dict.fromkeys(places, LATEST))[places[0]].offset == 500
    assert seen == [list(range(500))] * 2


def test_offsets_are_found_by_time(client: Client, topic: str) -> None:
    at, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    write(client, at, 300)
    assert client.list_offsets({at: EARLIEST, empty: LATEST})[at].offset == 0
    found = client.list_offsets({at: TIME_MS + 250, empty: TIME_MS})
    assert found[at] == (250, TIME_MS + 250)
    assert found[empty].offset == -1
    assert client.list_offsets({at: TIME_MS + 301})[at].offset == -1
    assert client.list_offsets({at: MAX_TIMESTAMP})[at] == (299, TIME_MS + 299)
    assert client.list_offsets({at: LATEST}, read_committed=True)[at].offset == 300


def test_a_reader_of_a_log_that_ends_too_early_says_so(bootstrap: str, client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 10)
    seen = []
    with (
        Client(bootstrap, deadline_ms=3_000) as hasty,
        pytest.raises(TimedOut, match="up to 20, but it has ended at 10"),
    ):
        for fetched in hasty.reader(at, 0, 20, wait_ms=50):
            seen += keys(fetched.records, 0, 20)
    assert seen == list(range(10))


def test_time_in_which_the_caller_was_busy_does_not_count(
    bootstrap: str, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 3000, size=1000)
    with Client(bootstrap, deadline_ms=60_000, request_timeout_ms=50_000) as busy, Producer(busy) as producer:
        reader = busy.reader(at, 0, 3000, bytes_max=1_500_000)
        first = next(reader).next_offset
        producer.send(TopicPartition(topic, 1), batch_of(range(10)))
        now_ms = busy.shell.now_ms
        monkeypatch.setattr(busy.shell, "now_ms", lambda: now_ms() + 3_600_000)
        assert next(reader).next_offset > first
        producer.flush()


def test_an_offset_beyond_the_log_says_what_there_is(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 10)
    with pytest.raises(
        OffsetOutOfRange, match=r"has no offset 11: it holds 0 up to 10 \(exclusive\)"
    ) as caught:
        client.fetch(at, 11)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.log_start_offset, again.high_watermark, str(again)) == (0, 10, str(caught.value))


# Writing


def test_several_producers_write_at_once(client: Client, topic: str) -> None:
    acked: list[int] = []
    at, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with Producer(client) as first, Producer(client, acks=1, in_flight=1) as second:
        for number in range(50):
            first.send(at, batch_of(range(number, number + 1)), acked.append)
            second.send(other, batch_of(range(number, number + 1)))
    assert acked == list(range(50))
    assert keys(client.fetch(other, 0).records, 0, 50) == list(range(50))


def test_a_producer_sends_more_than_it_may_keep(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    with Producer(client) as producer:
        for number in range(45):
            producer.send(at, encode_batch([(TIME_MS, b"%d" % number, b"x" * 900_000, ())]))
    seen = []
    for fetched in client.reader(at, 0, 45):
        seen += keys(fetched.records, 0, 45)
    assert seen == list(range(45))


def test_a_batch_that_is_too_large_ends_the_producer(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    producer = Producer(client)
    producer.send(at, encode_batch([(TIME_MS, None, b"x" * 2_000_000, ())]))
    with pytest.raises(BatchTooLarge, match="send smaller batches"):
        producer.flush()
    with pytest.raises(BatchTooLarge):
        producer.send(at, batch_of(range(1)))
    producer.close()
    assert client.list_offsets({at: LATEST})[at].offset == 0


def test_an_error_in_the_block_abandons_what_was_not_sent(client: Client, topic: str) -> None:
    with pytest.raises(RuntimeError, match="mine"), Producer(client) as producer:
        producer.send(TopicPartition(topic, 0), batch_of(range(1)))
        raise RuntimeError("mine")
    with pytest.raises(WireError, match="closed"):
        producer.send(TopicPartition(topic, 0), batch_of(range(1)))


@pytest.mark.parametrize("settings", [{"acks": 0}, {"acks": 2}, {"in_flight": 0}, {"in_flight": 6}])
def test_settings_that_would_lose_the_order_are_refused(client: Client, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Producer(client, **settings)


def test_a_batch_that_cannot_be_filled_in_is_refused(client: Client, topic: str) -> None:
    with Producer(client) as producer, pytest.raises(TypeError, match="bytearray"):
        producer.send(TopicPartition(topic, 0), bytes(batch_of(range(1))))  # type: ignore[arg-type]


# Groups


def test_offsets_of_a_group_are_committed_and_read_back(
    client: Client, topic: str, unique: Callable[[str], str]
) -> None:
    group = unique("group")
    at, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert client.committed(group, [at]) == {}
    client.commit(group, {at: 5}, metadata="by a test")
    client.commit(group, {at: 7})
    assert client.committed(group, [at, other]) == {at: 7}
    client.commit(group, {})
    with pytest.raises(UnknownTopic, match="no partition"):
        client.commit(group, {TopicPartition(unique("nothing"), 0): 1})


# Life


def test_nobody_listening_is_said_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with (
            Client(f"127.0.0.1:{port}", deadline_ms=300) as client,
            pytest.raises(
                Unreachable, match=f"cannot reach any of 127.0.0.1:{port}; is a broker running there"
            ) as caught,
        ):
            client.topics()
    assert "\n" not in str(caught.value)


def test_a_host_that_does_not_exist_is_said() -> None:
    with (
        Client("no-such-host.invalid:9092", deadline_ms=300) as client,
        pytest.raises(Unreachable, match="host"),
    ):
        client.topics()


def test_a_dead_address_before_a_good_one_costs_nothing(bootstrap: str) -> None:
    with Client(f"127.0.0.1:1,{bootstrap}") as client:
        assert isinstance(client.topics(), dict)


def test_a_host_whose_first_address_leads_nowhere_is_reached_by_the_next(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = bootstrap.rsplit(":", 1)
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        # Who listens and accepts nobody: when its queue is full, it answers no more.
        full.bind((host, 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", where)
            for where in (full.getsockname(), (host, int(port)))
        ]
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda name, *rest, **more: found if name == "two" else real(name, *rest, **more),
        )
        monkeypatch.setattr(links, "CONNECT_TIMEOUT_MS", 300)
        with Client(f"two:{port}", deadline_ms=20_000) as client:
            assert isinstance(client.topics(), dict)


def test_a_server_that_is_no_broker_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with (
                Client(f"127.0.0.1:{server.getsockname()[1]}", deadline_ms=3_000) as client,
                pytest.raises(Unreachable, match="is not a plaintext Kafka broker"),
            ):
                client.topics()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_connection_that_ended_between_two_calls_is_made_again(client: Client, topic: str) -> None:
    for connection in client.shell._sockets.values():
        assert connection.socket is not None
        connection.socket.shutdown(socket.SHUT_RDWR)
    assert list(client.topics([topic])) == [topic]
    assert client.fetch(TopicPartition(topic, 0), 0, wait_ms=1).next_offset == 0


def test_a_closed_client_says_so(bootstrap: str) -> None:
    client = Client(bootstrap)
    client.topics()
    client.close()
    client.close()
    with pytest.raises(WireError, match="this client is closed"):
        client.topics()


def test_threads_share_a_client(client: Client, topic: str) -> None:
    at = TopicPartition(topic, 0)
    write(client, at, 2000)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            seen: list[int] = []
            for fetched in client.reader(at, 0, 2000, bytes_max=3000):
                seen += keys(fetched.records, 0, 2000)
            assert seen == list(range(2000))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_shared_client_is_one_per_process_and_settings(bootstrap: str) -> None:
    client = shared(bootstrap)
    other = shared(bootstrap, deadline_ms=5_000)
    try:
        assert shared(bootstrap) is client
        assert other is not client
    finally:
        client.close()
        other.close()
    assert shared(bootstrap) is not client
    shared(bootstrap).close()


# Forks in a process of its own, as Spark's worker daemon does: the process of the tests has threads of
# other libraries in it, and a fork of such a one may crash in them.
FORK = """
import os, sys
from penstock.wire import WireError, shared

bootstrap, topic = sys.argv[1:]
client = shared(bootstrap)
assert list(client.topics([topic])) == [topic]
child = os.fork()
if child == 0:
    mine = shared(bootstrap)
    assert mine is not client
    assert list(mine.topics([topic])) == [topic]
    try:
        client.topics()
    except WireError as error:
        assert "create another one after a fork" in str(error), error
    else:
        sys.exit("the client of another process was used")
    mine.close()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert list(client.topics([topic])) == [topic], "the child has disturbed the connection"
client.close()
"""


def test_a_forked_process_has_a_shared_client_of_its_own(bootstrap: str, topic: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORK, bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_error_code_survives_being_pickled() -> None:
    error = BrokerRefused("no", ErrorCode.INVALID_RECORD)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code) == ("no", ErrorCode.INVALID_RECORD)
