"""What no client should send, on each kind of port of a real broker: a documented error, or a closed connection.

What a port has of its own is tested with it (``tests/tls``, ``tests/sasl``, ``tests/broker/network``). Here is what
must not depend on the port: requests behind a TLS handshake and a login are held to the rules of those in plain
text. All the while librdkafka produces and consumes on the same port.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache

import pytest

from penstock.protocol.apis import APIS, CLIENT, INTERNAL, advertised
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, ReplicaState
from penstock.protocol.messages.offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.security import SaslHandshakeRequest
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest, MetadataRequest
from penstock.protocol.records import encode_batch
from penstock.protocol.requests import request_frame
from tests.broker.memory import MEGABYTE, forget_peak, peak_bytes, resident_bytes
from tests.broker.network.test_bad_inputs import OTHER_PROTOCOLS
from tests.cluster.wire import NoAnswer, Wire
from tests.interop.ports import HELLO, LISTENERS, Ports, SteadyClient, ports
from tests.tls.files import TlsFiles

MEMORY_BYTES = 48 * MEGABYTE
FETCH_VERSION = 12
ONLY_NODES = sorted({api.key for api in advertised(INTERNAL)} - {api.key for api in advertised(CLIENT)})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    with ports(TlsFiles(tmp_path_factory.mktemp("ports"))) as broker:
        yield broker


@pytest.fixture(scope="module", params=LISTENERS)
def listener(broker: Ports, request: pytest.FixtureRequest) -> Iterator[str]:
    """One kind of port, with another client on it and limited memory."""
    name: str = request.param
    before = resident_bytes(broker.pid)
    forget_peak(broker.pid)
    with SteadyClient(broker.librdkafka(name), name):
        yield name
    assert peak_bytes(broker.pid) - before < MEMORY_BYTES
    assert "Traceback" not in broker.process.log_tail()


@pytest.fixture
def wire(broker: Ports, listener: str) -> Iterator[Wire]:
    with broker.log_in(listener) as wire:
        yield wire


def fetch(topic: str, **changed: int) -> FetchRequest:
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1 << 20,
        topics=[FetchTopic(topic=topic, partitions=[partition])],
    )
    for name, value in changed.items():
        setattr(
            partition if name in ("current_leader_epoch", "partition_max_bytes") else request, name, value
        )
    return request


def produce(topic: str, records: bytes) -> ProduceRequest:
    data = PartitionProduceData(index=0, records=memoryview(records))
    return ProduceRequest(
        acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=topic, partition_data=[data])]
    )


@pytest.mark.parametrize("size", [-1, 0, 3, 2**31 - 1])
def test_lengths_that_no_frame_has_close_the_connection(wire: Wire, size: int) -> None:
    assert wire.ends_after(struct.pack(">i", size) + bytes(16))


@pytest.mark.parametrize("what", OTHER_PROTOCOLS)
def test_other_protocols_are_closed(broker: Ports, wire: Wire, listener: str, what: str) -> None:
    """Behind the login, and instead of it."""
    assert wire.ends_after(OTHER_PROTOCOLS[what])
    with broker.connect(listener) as stranger:
        assert stranger.ends_after(OTHER_PROTOCOLS[what])


def test_arrays_longer_than_their_frame_close_the_connection(wire: Wire) -> None:
    body = struct.pack(">hhihi", 3, 1, 1, -1, 2**31 - 1)
    assert wire.ends_after(struct.pack(">i", len(body)) + body)


def test_whoever_claims_to_be_a_replica_is_refused(wire: Wire, listener: str) -> None:
    """CVE-2018-1288."""
    assert wire.call(fetch(listener, replica_id=2), FETCH_VERSION).error_code == (
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    )
    request = fetch(listener)
    request.replica_state = ReplicaState(replica_id=2, replica_epoch=1)
    assert wire.call(request, 15).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


@pytest.mark.parametrize("key", ONLY_NODES)
def test_what_only_nodes_may_ask_closes_the_connection(wire: Wire, key: int) -> None:
    api = APIS[key]
    assert wire.ends_after(b"".join(request_frame(api, api.version_max, 1, b"x", api.request())))


def test_forged_epochs_and_extreme_limits_are_answered(wire: Wire, listener: str) -> None:
    def answer(**changed: int) -> int:
        (topic,) = wire.call(fetch(listener, **changed), FETCH_VERSION).responses
        return int(topic.partitions[0].error_code)

    assert answer(current_leader_epoch=2**31 - 1) == ErrorCode.UNKNOWN_LEADER_EPOCH
    for limit in (-1, 0, 2**31 - 1):
        assert answer(max_bytes=limit) == answer(partition_max_bytes=limit) == ErrorCode.NONE


@cache
def bomb(codec: Codec) -> bytes:
    return bytes(encode_batch([(1, None, bytes(64 * MEGABYTE), [])], codec=codec))


def test_bombs_are_stored_and_do_not_go_off(wire: Wire, listener: str) -> None:
    """CVE-2023-34455: 64 MB in some kilobytes, or more than a batch may have."""
    topic = f"bombs-{listener}"
    created = CreatableTopic(name=topic, num_partitions=1, replication_factor=1)
    assert not wire.call(CreateTopicsRequest(topics=[created]), 7).topics[0].error_code
    errors = set()
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        answer = wire.call(produce(topic, bomb(codec)), 9)
        errors.add(answer.responses[0].partition_responses[0].error_code)
    assert errors <= {ErrorCode.NONE, ErrorCode.MESSAGE_TOO_LARGE} and ErrorCode.NONE in errors
    # To find a record by its time, a batch is decompressed.
    partition = ListOffsetsPartition(partition_index=0, timestamp=1)
    looked_up = ListOffsetsRequest(topics=[ListOffsetsTopic(name=topic, partitions=[partition])])
    assert not wire.call(looked_up, 7).topics[0].partitions[0].error_code


def test_strangers_send_small_frames_and_three_apis(broker: Ports, listener: str) -> None:
    """CVE-2022-34917, and a Produce before authentication: where there is a login, it comes first."""
    has_login = listener.startswith("SASL")
    frame = b"".join(request_frame(APIS[0], 9, 1, b"x", produce(listener, b"")))
    with broker.connect(listener) as wire:
        assert not wire.call(HELLO, 3).error_code
        if has_login:
            assert wire.ends_after(frame)
        else:
            assert wire.call(MetadataRequest(topics=[]), 12).brokers
    if has_login:
        with broker.connect(listener) as wire:
            assert wire.ends_after(struct.pack(">ihhih", 600_000, 36, 2, 1, -1))


def test_a_login_is_served_where_there_is_one_and_refused_elsewhere(broker: Ports, listener: str) -> None:
    has_login = listener.startswith("SASL")
    with broker.connect(listener) as wire:
        answer = wire.call(SaslHandshakeRequest(mechanism="GSSAPI"), 1)
        assert answer.error_code == (
            ErrorCode.UNSUPPORTED_SASL_MECHANISM if has_login else ErrorCode.ILLEGAL_SASL_STATE
        )
        assert bool(answer.mechanisms) == has_login


def test_plain_text_and_tls_do_not_pass_for_each_other(broker: Ports, listener: str) -> None:
    other = {
        "PLAINTEXT": "SSL",
        "SSL": "PLAINTEXT",
        "SASL_PLAINTEXT": "SASL_SSL",
        "SASL_SSL": "SASL_PLAINTEXT",
    }
    address = broker.process.addresses[listener]
    with pytest.raises(NoAnswer), Wire(address, context=broker.context(other[listener])) as wire:
        wire.call(HELLO, 3)
