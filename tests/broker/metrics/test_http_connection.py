"""HTTP on the listener of the metrics: what scrapers and probes send, and what nobody should."""

from __future__ import annotations

import struct

import pytest

from penstock.broker.metrics.http_connection import (
    ANSWER_TIMEOUT_MS,
    HEADERS_BYTES_MAX,
    IDLE_TIMEOUT_MS,
    LINGER_MS,
    REQUEST_TIMEOUT_MS,
)
from penstock.broker.metrics.server import CONNECTIONS_MAX
from tests.broker.metrics.scraping import ADDRESS, Http
from tests.virtual import World


@pytest.fixture
def world() -> World:
    return World(metrics=ADDRESS)


def test_a_probe_is_answered(world: World) -> None:
    answer = Http(world).get("/healthz")
    assert (answer.status, answer.body) == (200, b"ok\n")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_a_scraper_stays_connected(world: World) -> None:
    http = Http(world)
    for _ in range(3):
        assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
        world.run_for(IDLE_TIMEOUT_MS - 1_000)
    assert not http.is_closed
    world.run_for(2_000)
    assert http.is_closed


def test_head_is_answered_without_the_body(world: World) -> None:
    http = Http(world)
    answer = http.get("/healthz", method="HEAD")
    assert (answer.status, answer.headers["content-length"]) == (200, "3")
    assert http.get("/healthz").body == b"ok\n"


def test_what_follows_a_question_mark_is_ignored(world: World) -> None:
    assert Http(world).get("/healthz?verbose=1").status == 200


@pytest.mark.parametrize(
    "path", ["/", "/metrics/", "/healthz/../metrics", "/%6detrics", "*", "/" + "x" * 5_000]
)
def test_other_paths_are_not_found(world: World, path: str) -> None:
    assert Http(world).get(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PENSTOCK"])
def test_other_methods_are_refused(world: World, method: str) -> None:
    http = Http(world)
    answer = http.get("/metrics", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    assert http.get("/healthz").status == 200


@pytest.mark.parametrize("more", ["Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"])
def test_a_request_with_a_body_is_refused_and_closed(world: World, more: str) -> None:
    http = Http(world)
    assert http.get("/metrics", more=more).status == 413
    http.send(b"hello")
    world.run_for(LINGER_MS + 1)
    assert http.is_closed


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n GET",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",  # without a Host
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /met\x00rics HTTP/1.1\r\nHost: a\r\n\r\n",
        struct.pack(">ihhihi", 16, 18, 0, 1, 0, 0),  # ApiVersions
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
    ],
)
def test_what_is_not_http_gets_an_error_and_is_closed(world: World, data: bytes) -> None:
    http = Http(world)
    http.send(data)
    assert http.answer().status == 400
    world.run_for(LINGER_MS + 1)
    assert http.is_closed
    assert Http(world).get("/healthz").status == 200


def test_headers_that_never_end_are_refused(world: World) -> None:
    http = Http(world)
    http.send(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000)
    answer = http.answer()
    assert answer.status in (400, 431)
    # What else comes is read and dropped, so that the answer arrives; but not for ever.
    for _ in range(20):
        http.send(b"x" * HEADERS_BYTES_MAX)
        world.run_for(LINGER_MS // 10)
        if http.is_closed:
            break
    assert http.is_closed


def test_a_request_that_comes_byte_by_byte_is_answered_if_it_comes_in_time(world: World) -> None:
    http = Http(world)
    for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n":
        http.send(bytes([byte]))
        world.run_for(100)
    assert http.answer().status == 200


def test_a_request_that_comes_too_slowly_is_closed(world: World) -> None:
    http = Http(world)
    http.send(b"GET /healthz HTTP/1.1\r\nX: ")
    for _ in range(REQUEST_TIMEOUT_MS // 500 + 1):
        if not http.is_closed:
            http.send(b"x")
        world.run_for(500)
    assert http.is_closed


def test_who_connects_and_says_nothing_is_closed(world: World) -> None:
    http = Http(world)
    world.run_for(REQUEST_TIMEOUT_MS + 1)
    assert http.is_closed


def test_who_leaves_is_forgotten(world: World) -> None:
    for _ in range(3 * CONNECTIONS_MAX):
        http = Http(world)
        http.ask("/metrics")
        http.stream.close()
    world.run_for(1_000)
    assert Http(world).get("/metrics").status == 200


def test_requests_in_one_packet_are_answered_in_order(world: World) -> None:
    http = Http(world)
    http.send(
        b"".join(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in ("/a", "/readyz", "/healthz"))
    )
    assert [http.answer().status for _ in range(3)] == [421, 421, 421]
    http.send(
        b"".join(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            for path in ("/a", "/readyz", "/healthz")
        )
    )
    assert [http.answer().body for _ in range(3)] == [
        b"try /metrics, /healthz or /readyz\n",
        b"ready\n",
        b"ok\n",
    ]


def test_a_reader_that_stops_is_closed_and_others_are_served(world: World) -> None:
    http = Http(world, window=1_000)
    http.ask("/metrics")
    world.run_for(ANSWER_TIMEOUT_MS // 2)
    assert Http(world).get("/metrics").status == 200
    world.run_for(ANSWER_TIMEOUT_MS // 2 + 1)
    assert http.is_closed


def test_a_slow_reader_gets_everything(world: World) -> None:
    http = Http(world, window=0)
    http.ask("/metrics")
    for _ in range(200):
        world.run_for(10)
        assert http.stream.other is not None
        http.stream.other.open_window(500)
    assert b"penstock_request_errors_total" in http.answer().body


def test_a_connection_may_ask_to_be_closed(world: World) -> None:
    http = Http(world)
    assert http.get("/healthz", more="Connection: close\r\n").status == 200
    assert http.is_closed
    old = Http(world)
    old.send(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert old.answer().status == 200
    assert old.is_closed


def test_of_too_many_connections_an_idle_one_makes_room(world: World) -> None:
    idle = [Http(world) for _ in range(CONNECTIONS_MAX)]
    for http in idle:
        assert http.get("/healthz").status == 200
    assert Http(world).get("/healthz").status == 200
    assert [http.is_closed for http in idle] == [True, *([False] * (CONNECTIONS_MAX - 1))]


def test_of_too_many_connections_that_are_busy_the_new_one_is_closed(world: World) -> None:
    busy = [Http(world) for _ in range(CONNECTIONS_MAX)]
    for http in busy:
        http.send(b"GET ")
    world.run_for(1)
    assert Http(world).is_closed
    assert not any(http.is_closed for http in busy)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("127.0.0.1", 200),
        ("localhost:9464", 200),
        ("LOCALHOST", 200),
        ("[::1]:9464", 200),
        ("[::1]", 200),
        ("10.0.0.1:9464", 200),
        ("rebound.example:9464", 421),
        ("rebound.example", 421),
        ("localhost.example", 421),
    ],
)
def test_a_web_page_cannot_read_it_under_a_name_of_its_own(world: World, host: str, status: int) -> None:
    assert Http(world).get("/metrics", host=host).status == status


def test_other_machines_may_use_any_name_if_it_is_open_to_them() -> None:
    world = World(metrics=("0.0.0.0", ADDRESS[1]))
    assert Http(world).get("/healthz", host="broker-1.example:9464").status == 200


def test_nothing_is_served_after_the_end(world: World) -> None:
    http = Http(world)
    assert http.get("/healthz").status == 200
    world.node.close()
    assert http.is_closed
    with pytest.raises(AssertionError, match="nobody listens"):
        Http(world)
