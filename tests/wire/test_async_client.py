"""The asyncio client against real brokers, in both loops. What the core decides is tested in virtual time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from penstock.model import TopicPartition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import DescribeClusterRequest
from penstock.protocol.messages.configs import (
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from penstock.protocol.messages.groups import DescribeGroupsRequest, ListGroupsRequest
from penstock.protocol.messages.topics import DeleteTopicsRequest, DeleteTopicState
from penstock.protocol.records import encode_batch
from penstock.wire import (
    EARLIEST,
    LATEST,
    AsyncClient,
    AuthenticationFailed,
    Client,
    OffsetOutOfRange,
    Producer,
    TlsFailed,
    TransactionalProducer,
    Unreachable,
    WireError,
    calls,
    links,
)
from penstock.wire.asking import Anybody, BrokerWith, ControllerOf, CoordinatorOf, LeaderOf
from penstock.wire.coordinators import Kind
from tests.sasl.broker import sasl_broker
from tests.support import wait_until
from tests.tls.broker import TlsBroker

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Result]], Result]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run[Any]:
    def run_in(work: Coroutine[Any, Any, Any]) -> Any:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    return run_in


def write(bootstrap: str, at: TopicPartition, values: list[bytes], **settings: Any) -> None:
    with Client(bootstrap, **settings) as client, Producer(client) as producer:
        producer.send(
            at, encode_batch([(time.time_ns() // 1_000_000, b"key", value, ()) for value in values])
        )


def test_topics_are_created_and_described_and_requests_go_where_they_belong(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    async def work() -> None:
        topic = unique("async")
        async with AsyncClient(bootstrap) as client:
            assert await client.do(calls.create_topic(topic, 3))
            assert not await client.do(calls.create_topic(topic, 3))
            found = await client.do(calls.topics([topic, "there-is-no-such-topic"]))
            assert sorted(found[topic].partitions) == [0, 1, 2] and len(found) == 1
            assert await client.do(calls.topics([])) == {}
            change = IncrementalAlterableConfig(name="retention.ms", config_operation=0, value="5000")
            resource = IncrementalAlterConfigsResource(resource_type=2, resource_name=topic, configs=[change])
            altered = await client.do(
                calls.ask(ControllerOf(), IncrementalAlterConfigsRequest(resources=[resource]))
            )
            assert altered.responses[0].error_code == ErrorCode.NONE
            assert (await client.do(calls.topic_configs([topic])))[topic]["retention.ms"] == "5000"
            cluster = await client.do(calls.ask(Anybody(), DescribeClusterRequest()))
            broker = cluster.brokers[0].broker_id
            groups = await client.do(calls.ask(BrokerWith(broker), ListGroupsRequest()))
            assert groups == (await client.do(calls.ask_every(ListGroupsRequest())))[broker]
            group = unique("group")
            described = await client.do(
                calls.ask(CoordinatorOf(Kind.GROUP, group), DescribeGroupsRequest(groups=[group]))
            )
            assert described.groups[0].group_id == group
            leader = LeaderOf(TopicPartition(topic, 1))
            assert await client.do(calls.ask(leader, DescribeClusterRequest()))
            delete = DeleteTopicsRequest(
                topics=[DeleteTopicState(name=topic)], topic_names=[topic], timeout_ms=30_000
            )
            deleted = await client.do(calls.ask(Anybody(), delete, is_repeatable=False))
            assert deleted.responses[0].error_code == ErrorCode.NONE
            with pytest.raises(Unreachable, match="no broker 999"):
                await client.do(calls.ask(BrokerWith(999), ListGroupsRequest()))

    run(work())


def test_records_are_read_with_everything_they_have(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    at = TopicPartition(unique("async"), 0)
    now_ms = time.time_ns() // 1_000_000
    with Client(bootstrap) as blocking, Producer(blocking) as producer:
        blocking.create_topic(at.topic, 1)
        headers = [("trace", b"1"), ("trace", None), ("ü", b"")]
        producer.send(at, encode_batch([(now_ms, b"a", b"one", headers), (now_ms + 1, None, None, ())]))
        producer.send(at, encode_batch([(now_ms + 2, b"", b"", ())]))

    async def work() -> None:
        async with AsyncClient(bootstrap) as client:
            fetched = await client.fetch(at, 0)
            records = fetched.records
            while fetched.next_offset < 3:
                fetched = await client.fetch(at, fetched.next_offset)
                records += fetched.records
            assert [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in records] == [
                (0, now_ms, b"a", b"one", headers),
                (1, now_ms + 1, None, None, []),
                (2, now_ms + 2, b"", b"", []),
            ]
            assert (await client.fetch(at, 1)).records[0].offset == 1
            times = {at: now_ms + 2}
            assert (await client.do(calls.list_offsets(times)))[at].offset == 2
            assert (await client.do(calls.list_offsets({at: EARLIEST})))[at].offset == 0
            assert (await client.do(calls.list_offsets({at: LATEST})))[at].offset == 3
            assert (await client.fetch(at, 3, wait_ms=1)).records == []
            with pytest.raises(OffsetOutOfRange):
                await client.fetch(at, 4)

    run(work())


def test_only_committed_records_are_read_and_gaps_are_passed(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    at = TopicPartition(unique("async"), 0)
    with Client(bootstrap) as blocking:
        blocking.create_topic(at.topic, 1)
        with TransactionalProducer(blocking, unique("writer")) as producer:
            producer.init()
            for number in range(4):
                producer.begin()
                producer.send(at, encode_batch([(0, None, b"%d" % number, ())] * 2))
                if number % 2:
                    producer.abort()
                else:
                    producer.commit()

    async def work() -> None:
        async with AsyncClient(bootstrap) as client:
            seen: dict[bool, list[bytes | None]] = {True: [], False: []}
            for committed, values in seen.items():
                offset = 0
                while offset < 12:
                    fetched = await client.fetch(at, offset, read_committed=committed)
                    values += [record.value for record in fetched.records]
                    offset = fetched.next_offset
            # The last marker is behind the last record, and progress without records is progress.
            assert seen[True] == [b"0", b"0", b"2", b"2"]
            assert seen[False] == [b"%d" % number for number in range(4) for _ in range(2)]

    run(work())


def test_hundreds_of_long_polls_share_a_few_connections_and_wake_at_once(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    topic = unique("async")

    async def work() -> None:
        async with AsyncClient(bootstrap) as client:
            await client.do(calls.create_topic(topic, 20))
            places = [TopicPartition(topic, number) for number in range(20)]
            # Far longer than the test may take: only a record wakes them.
            waiting = [
                asyncio.create_task(client.fetch(at, 0, wait_ms=200_000)) for at in places for _ in range(20)
            ]
            await asyncio.sleep(0)
            for number, at in enumerate(places):
                await asyncio.to_thread(write, bootstrap, at, [b"%d" % number])
            for number, task in enumerate(waiting):
                assert [record.value for record in (await task).records] == [b"%d" % (number // 20)]
            assert len(client.shell._open) <= 4

    run(work())


def test_a_cancelled_call_leaves_nothing_and_the_client_goes_on(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    at = TopicPartition(unique("async"), 0)

    async def work() -> None:
        async with AsyncClient(bootstrap) as client:
            await client.do(calls.create_topic(at.topic, 1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.fetch(at, 0, wait_ms=200_000), 0.05)
            assert not client.shell.core._tasks
            await asyncio.to_thread(write, bootstrap, at, [b"one"])
            assert len((await client.fetch(at, 0)).records) == 1

    run(work())


def test_close_ends_what_waits_and_every_connection(
    bootstrap: str, unique: Callable[[str], str], run: Run[None]
) -> None:
    at = TopicPartition(unique("async"), 0)

    async def work() -> None:
        client = AsyncClient(bootstrap)
        await client.do(calls.create_topic(at.topic, 1))
        waiting = asyncio.create_task(client.fetch(at, 0, wait_ms=200_000))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(WireError, match="cancelled"):
            await waiting
        assert not client.shell._open
        with pytest.raises(WireError, match="closed"):
            await client.do(calls.topics())
        await client.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work())


def test_without_a_broker_the_error_names_the_address(
    run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.wire.operations.FIRST_CONTACT_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def work() -> None:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(Unreachable, match=f"127.0.0.1:{port}.*refused"):
                await client.do(calls.topics())
        async with AsyncClient("no-such-host.invalid:9092") as client:
            with pytest.raises(Unreachable, match="cannot resolve the host"):
                await client.do(calls.topics())

    run(work())


def test_a_broker_that_accepts_and_never_answers_is_given_up(
    run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "CONNECT_TIMEOUT_MS", 100)
    monkeypatch.setattr("penstock.wire.operations.FIRST_CONTACT_MS", 300)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}") as client:
                with pytest.raises(Unreachable, match="silent"):
                    await client.do(calls.topics())

    run(work())


def test_records_are_read_over_tls(
    tls_broker: TlsBroker, unique: Callable[[str], str], run: Run[None]
) -> None:
    at = TopicPartition(unique("tls"), 0)
    security = tls_broker.files.librdkafka("alice")
    address = tls_broker.address("MUTUAL")
    values = [bytes([number]) * 40_000 for number in range(20)]

    async def work() -> None:
        async with AsyncClient(address, security=security) as client:
            await client.do(calls.create_topic(at.topic, 1))
            await asyncio.to_thread(write, address, at, values, security=security)
            fetched = await client.fetch(at, 0)
            assert [record.value for record in fetched.records] == values
        async with AsyncClient(address, security={"security.protocol": "ssl"}) as client:
            with pytest.raises(TlsFailed, match="authority that is not trusted"):
                await client.do(calls.topics())
        async with AsyncClient(address) as client:
            with pytest.raises(WireError, match="TLS"):
                await client.do(calls.topics(), deadline_ms=2_000)

    run(work())


def test_a_client_logs_in_and_goes_on_beyond_its_session(tmp_path: Path, run: Run[None]) -> None:
    with sasl_broker(tmp_path, {"connections.max.reauth.ms": "2000"}) as broker:
        address = broker.address("SASL_SSL")

        async def work() -> None:
            tls = {**broker.files.librdkafka(), "security.protocol": "sasl_ssl"}
            token = {**tls, "sasl.mechanism": "OAUTHBEARER"}
            for security, source in (
                (broker.librdkafka("SASL_SSL", "PLAIN"), None),
                (token, lambda: broker.issuer.token(time.time())),
            ):
                async with AsyncClient(address, security=security, token=source) as client:
                    assert await client.do(calls.create_topic(security["sasl.mechanism"], 1))
            security = broker.librdkafka("SASL_SSL", "SCRAM-SHA-512")
            async with AsyncClient(address, security=security) as client:
                await client.do(calls.topics())
                ends = sessions(client)
                async with asyncio.timeout(30):
                    while sessions(client) == ends:
                        found = await client.do(calls.topics())
                        assert len(found) == 2
                        await asyncio.sleep(0.02)
            wrong = broker.librdkafka("SASL_SSL", "PLAIN", sasl_password="hunter3")
            async with AsyncClient(address, security=wrong) as client:
                with pytest.raises(AuthenticationFailed) as caught:
                    await client.do(calls.topics())
                assert "hunter3" not in str(caught.value)

        def sessions(client: AsyncClient) -> list[int | None]:
            return [link.authenticate_at_ms for link in client.shell.core.links._by_id.values()]

        run(work())


def test_a_host_whose_first_address_refuses_is_reached_at_the_next(
    bootstrap: str, run: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = bootstrap.split(":")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()

    async def work() -> None:
        async with AsyncClient(bootstrap) as client:
            loop = asyncio.get_running_loop()
            known = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            both = [(*known[0][:4], closed), *known]

            async def two(*_: Any, **__: Any) -> list[Any]:
                return list(both)

            client.shell._loop = _Resolving(loop, two)  # type: ignore[assignment]
            found = await client.do(calls.topics())
            assert isinstance(found, dict)

    run(work())


class _Resolving:
    """A loop with a resolver of the test's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, resolve: Any) -> None:
        self._loop = loop
        self.getaddrinfo = resolve

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def test_a_restarted_broker_is_found_again(run: Run[None]) -> None:
    from tests.support import BrokerProcess

    with BrokerProcess({}) as broker:

        async def work() -> None:
            async with AsyncClient(broker.bootstrap) as client:
                await client.do(calls.create_topic("orders", 1))
                waiting = asyncio.create_task(client.fetch(TopicPartition("orders", 0), 0, wait_ms=200_000))
                await asyncio.to_thread(broker.restart, kill=True)
                await asyncio.to_thread(write, broker.bootstrap, TopicPartition("orders", 0), [b"one"])
                assert [record.value for record in (await waiting).records] == [b"one"]

        run(work())
    wait_until(lambda: not broker.is_running, 10, "the broker stops")
