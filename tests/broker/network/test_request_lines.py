"""What the log says about a request that was refused or failed: enough to find it in the log of its client."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from penstock.broker.network.connection import request_of
from tests.broker.stage import Stage

API_VERSIONS = 18
HEARTBEAT = 12


def frame(key: int, version: int, correlation_id: int, client_id: bytes | None, body: bytes = b"") -> bytes:
    header = struct.pack(">hhih", key, version, correlation_id, -1 if client_id is None else len(client_id))
    content = header + (client_id or b"") + body
    return struct.pack(">i", len(content)) + content


def said_about(data: bytes, stage: Stage | None = None) -> dict[str, Any]:
    stage = stage or Stage()
    stream = stage.connect()
    stream.arrive(data)
    stage.spawn.run()
    assert stream.is_closed
    return stage.said[-1]


def test_a_request_that_is_not_served_is_named() -> None:
    assert said_about(frame(999, 3, 77, b"my-app")) == {
        "event": "closed a connection",
        "peer": "10.0.0.1",
        "reason": "API 999 version 3 is not served",
        "api": "999",
        "version": 3,
        "correlation_id": 77,
        "client_id": "my-app",
    }


def test_a_request_that_cannot_be_decoded_is_named() -> None:
    said = said_about(frame(HEARTBEAT, 0, -5, None, b"\0"))
    assert said["event"] == "closed a connection"
    assert (said["api"], said["version"], said["correlation_id"]) == ("Heartbeat", 0, -5)
    assert "client_id" not in said


def test_a_request_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    route = stage.server.route(API_VERSIONS, 0)
    assert route is not None

    def fail(*_: Any) -> None:
        raise ValueError("a defect of ours")

    monkeypatch.setattr(route, "handle", fail)
    assert said_about(frame(API_VERSIONS, 0, 1_000_000, b"\xffa\nb"), stage) == {
        "event": "a request failed",
        "peer": "10.0.0.1",
        "api": "ApiVersions",
        "version": 0,
        "correlation_id": 1_000_000,
        "client_id": "'\\ufffda\\nb'",
    }


def test_a_frame_without_a_whole_header_has_nothing_to_say() -> None:
    assert request_of(memoryview(b"\0\x12\0\0\0")) == {}
    assert request_of(None) == {}
