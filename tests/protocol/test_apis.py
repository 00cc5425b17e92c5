from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.protocol.apis import APIS, CLIENT, INTERNAL, Api, advertised
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.groups import HeartbeatRequest, HeartbeatResponse
from penstock.protocol.schema import encode, is_flexible, version_range


@pytest.mark.parametrize("api", advertised(INTERNAL), ids=lambda api: api.name)
def test_the_table_and_the_messages_agree(api: Api) -> None:
    assert APIS[api.key] is api
    for cls in (api.request, api.response):
        assert api.key == cls.KEY
        assert version_range(cls.VERSIONS) == range(api.version_min, api.version_max + 1)
        for version in version_range(cls.VERSIONS):
            assert is_flexible(cls, version) == api.is_flexible(version)
    assert api.advertised_min <= api.version_min


def test_what_only_nodes_may_ask_is_not_advertised_to_clients() -> None:
    to_clients, to_nodes = (
        {api.name for api in advertised(CLIENT)},
        {api.name for api in advertised(INTERNAL)},
    )
    assert to_clients < to_nodes
    assert to_nodes - to_clients == {
        "Vote",
        "BeginQuorumEpoch",
        "EndQuorumEpoch",
        "AlterPartition",
        "FetchSnapshot",
        "Envelope",
        "BrokerRegistration",
        "BrokerHeartbeat",
        "AllocateProducerIds",
        "AssignReplicasToDirs",
    }


def test_apis_are_advertised_in_the_order_of_their_keys() -> None:
    keys = [api.key for api in advertised(INTERNAL)]
    assert keys == sorted(set(keys))


def test_produce_is_advertised_from_zero_but_served_from_three() -> None:
    produce = APIS[0]
    assert (produce.advertised_min, produce.version_min) == (0, 3)
    assert [produce.serves(version) for version in (0, 2, 3, 13, 14)] == [False, False, True, True, False]


def test_flexible_versions_have_the_longer_headers() -> None:
    produce = APIS[0]
    assert [produce.request_header_version(version) for version in (8, 9)] == [1, 2]
    assert [produce.response_header_version(version) for version in (8, 9)] == [0, 1]


def test_api_versions_is_answered_with_the_old_header_always() -> None:
    api = APIS[18]
    assert [api.request_header_version(version) for version in (0, 2, 3, 4)] == [1, 1, 2, 2]
    assert [api.response_header_version(version) for version in (0, 2, 3, 4)] == [0, 0, 0, 0]


def test_an_api_without_flexible_versions_keeps_the_short_headers() -> None:
    offset_delete = APIS[47]
    assert (offset_delete.request_header_version(0), offset_delete.response_header_version(0)) == (1, 0)


def test_codecs_are_looked_up_by_version() -> None:
    heartbeat = APIS[12]
    request = HeartbeatRequest(group_id="g", member_id="m", generation_id=4)
    assert heartbeat.decode_request[4](memoryview(encode(request, 4)), 0)[0] == request
    response = HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert b"".join(heartbeat.encode_response[0](response)) == b"\0\x1b"
    assert heartbeat.decode_request[4] is heartbeat.decode_request[4]


def test_a_node_writes_what_another_reads() -> None:
    heartbeat = APIS[12]
    request = HeartbeatRequest(group_id="g", member_id="m", generation_id=4)
    assert b"".join(heartbeat.encode_request[4](request)) == encode(request, 4)
    response = HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert heartbeat.decode_response[0](memoryview(b"\0\x1b"), 0) == (response, 2)


@pytest.mark.parametrize("version", [-1, 5])
def test_a_version_not_served_has_no_codec(version: int) -> None:
    with pytest.raises(KeyError):
        APIS[12].decode_request[version]
    with pytest.raises(KeyError):
        APIS[12].encode_response[version]
    with pytest.raises(KeyError):
        APIS[12].encode_request[version]
    with pytest.raises(KeyError):
        APIS[12].decode_response[version]


def test_the_table_imports_no_messages_and_messages_compile_nothing() -> None:
    """Start-up pays for what it uses."""
    script = (
        "import sys, penstock.protocol.apis;"
        "assert not [name for name in sys.modules if 'protocol.messages' in name];"
        "import penstock.protocol.messages.groups;"
        "assert 'penstock.protocol.codegen' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_error_codes_have_kafkas_numbers() -> None:
    from kio.schema.errors import ErrorCode as KioErrorCode

    assert {code.name: code.value for code in ErrorCode} == {
        code.name.upper(): code.value for code in KioErrorCode
    }
