"""Requests in flight on one connection, and what answers them."""

from __future__ import annotations

import struct

import pytest

from penstock.protocol.apis import API_VERSIONS, APIS, Api
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.cluster import ApiVersionsRequest, ApiVersionsResponse
from penstock.protocol.messages.groups import HeartbeatRequest, HeartbeatResponse
from penstock.protocol.requests import CORRELATION_MAX, InFlight, request_frame
from penstock.protocol.schema import Message

HEARTBEAT = APIS[12]
BEAT = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")


def answer(correlation_id: int, api: Api, version: int, response: Message) -> memoryview:
    tags = b"\0" * api.response_header_version(version)
    body = b"".join(api.encode_response[version](response))
    return memoryview(struct.pack(">i", correlation_id) + tags + body)


@pytest.mark.parametrize(("version", "tags"), [(3, b""), (4, b"\0")])
def test_a_frame_has_its_length_its_header_and_tags_only_where_the_version_is_flexible(
    version: int, tags: bytes
) -> None:
    frame = b"".join(request_frame(HEARTBEAT, version, 7, b"me", BEAT))
    body = b"".join(HEARTBEAT.encode_request[version](BEAT))
    assert frame == struct.pack(">ihhih", len(frame) - 4, 12, version, 7, 2) + b"me" + tags + body


@pytest.mark.parametrize("version", [3, 4])
def test_answers_go_to_the_requests_in_the_order_sent(version: int) -> None:
    in_flight: InFlight[str] = InFlight(b"me")
    for name in ("first", "second"):
        in_flight.add(HEARTBEAT, version, BEAT, name)
    response = HeartbeatResponse(error_code=27)
    assert in_flight.oldest() == "first"
    assert in_flight.answered(answer(1, HEARTBEAT, version, response)) == ("first", response)
    assert in_flight.answered(answer(2, HEARTBEAT, version, response)) == ("second", response)
    assert not in_flight


def test_a_frame_that_answers_another_request_breaks_the_connection_and_takes_nothing() -> None:
    in_flight: InFlight[str] = InFlight(b"me")
    with pytest.raises(DecodeError):
        in_flight.answered(answer(1, HEARTBEAT, 4, HeartbeatResponse()))
    in_flight.add(HEARTBEAT, 4, BEAT, "first")
    in_flight.add(HEARTBEAT, 4, BEAT, "second")
    with pytest.raises(DecodeError):
        in_flight.answered(answer(2, HEARTBEAT, 4, HeartbeatResponse()))
    assert list(in_flight) == ["first", "second"]


def test_a_request_whose_answer_cannot_be_decoded_is_still_in_flight() -> None:
    in_flight: InFlight[str] = InFlight(b"me")
    in_flight.add(HEARTBEAT, 4, BEAT, "first")
    with pytest.raises(DecodeError):
        in_flight.answered(answer(1, HEARTBEAT, 4, HeartbeatResponse())[:6])
    assert in_flight.clear() == ["first"] and not in_flight


def test_a_message_that_cannot_be_encoded_is_not_in_flight() -> None:
    in_flight: InFlight[str] = InFlight(b"me")
    with pytest.raises((struct.error, OverflowError)):
        in_flight.add(HEARTBEAT, 4, HeartbeatRequest(group_id="g", generation_id=2**40, member_id="m"), "no")
    assert not in_flight


def test_correlation_ids_go_on_after_the_connection_has_ended_and_begin_again_at_the_top() -> None:
    in_flight: InFlight[str] = InFlight(b"me")
    in_flight.add(HEARTBEAT, 4, BEAT, "lost")
    in_flight.clear()
    in_flight.add(HEARTBEAT, 4, BEAT, "next")
    assert in_flight.answered(answer(2, HEARTBEAT, 4, HeartbeatResponse()))[0] == "next"
    in_flight._correlation_id = CORRELATION_MAX
    in_flight.add(HEARTBEAT, 4, BEAT, "first again")
    assert in_flight.answered(answer(0, HEARTBEAT, 4, HeartbeatResponse()))[0] == "first again"
    in_flight.check()


def test_the_answer_about_versions_has_no_tags_in_its_header() -> None:
    in_flight: InFlight[None] = InFlight(b"me")
    in_flight.add(APIS[API_VERSIONS], 3, ApiVersionsRequest(), None)
    _, message = in_flight.answered(answer(1, APIS[API_VERSIONS], 3, ApiVersionsResponse(error_code=35)))
    assert message.error_code == 35
