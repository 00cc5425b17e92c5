"""Alerts: only what changes, and a webhook that may fail in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from penstock.monitoring.alerts import Alerts, Change, Webhook, alert_document, check_url
from penstock.monitoring.findings import Finding, Severity
from tests.cluster.cluster import free_ports

LAGGING = Finding("growing-lag", Severity.WARNING, "group a", "5 behind", "add consumers")
OFFLINE = Finding("offline-partitions", Severity.CRITICAL, "orders", "1 of 2", "start it")
UNSEEN = Finding("not-seen", Severity.INFO, "this", "brokers", "rights")


def test_only_a_change_is_an_alert() -> None:
    alerts = Alerts()
    assert alerts.change([LAGGING]) == Change((LAGGING,), ())
    alerts.delivered([LAGGING])
    assert not alerts.change([LAGGING])
    other_words = Finding("growing-lag", Severity.WARNING, "group a", "9 behind", "add consumers")
    assert not alerts.change([other_words])
    assert alerts.change([OFFLINE]) == Change((OFFLINE,), (LAGGING,))


def test_a_finding_that_gets_worse_is_an_alert() -> None:
    alerts = Alerts()
    alerts.delivered([LAGGING])
    worse = Finding("growing-lag", Severity.CRITICAL, "group a", "5 behind", "add consumers")
    assert alerts.change([worse]) == Change((worse,), (LAGGING,))


def test_what_was_not_delivered_is_still_news() -> None:
    alerts = Alerts()
    assert alerts.change([LAGGING])
    assert alerts.change([LAGGING, OFFLINE]) == Change((LAGGING, OFFLINE), ())


def test_what_could_not_be_seen_is_no_alert() -> None:
    assert not Alerts().change([UNSEEN])


def test_the_document_has_everything_in_plain_words() -> None:
    document = alert_document("a:1", "2026-01-01T00:00:00Z", Change((LAGGING,), (OFFLINE,)), [LAGGING])
    assert json.loads(json.dumps(document)) == document
    assert (
        document["new"]
        == document["findings"]
        == [
            {
                "rule": "growing-lag",
                "severity": "warning",
                "subject": "group a",
                "what": "5 behind",
                "advice": "add consumers",
            }
        ]
    )


@pytest.mark.parametrize(
    "url",
    [
        *("", "file:///etc/passwd", "ftp://host/x", "http://", "//host/x", "host/x", "http://u:p@host/"),
        *("http://host:99999/", "http://host/a b", "http://host/\n", "javascript:alert(1)", "http://[::1/"),
    ],
)
def test_only_urls_of_http_are_accepted(url: str) -> None:
    with pytest.raises(ValueError):
        check_url(url)


class Receiver:
    """A web server that answers with the next of these codes, the last one again and again."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.heard: list[tuple[str, Any]] = []


@contextmanager
def receiving(receiver: Receiver) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.heard.append((self.headers["Content-Type"], json.loads(data)))
            code = receiver.codes.pop(0) if len(receiver.codes) > 1 else receiver.codes[0]
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not on standard error."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook?token=secret"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def post(url: str, pauses: list[float] | None = None) -> str | None:
    return Webhook(url, timeout_s=30.0, pause=([] if pauses is None else pauses).append).post({"a": 1})


def test_an_alert_is_posted_as_json() -> None:
    receiver = Receiver(204)
    with receiving(receiver) as url:
        assert post(url) is None
    assert receiver.heard == [("application/json", {"a": 1})]


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_server_in_trouble_is_asked_again_after_a_while(code: int) -> None:
    receiver, pauses = Receiver(code, code, 200), list[float]()
    with receiving(receiver) as url:
        assert post(url, pauses) is None
    assert (len(receiver.heard), pauses) == (3, [1.0, 2.0])


def test_it_is_given_up_in_the_end_without_the_secrets_of_the_url() -> None:
    receiver = Receiver(500)
    with receiving(receiver) as url:
        why = post(url)
    assert why is not None and "answered 500" in why and "secret" not in why
    assert len(receiver.heard) == 3


@pytest.mark.parametrize("code", [400, 404, 301, 307])
def test_a_refusal_or_a_redirect_is_not_repeated(code: int) -> None:
    receiver = Receiver(code)
    with receiving(receiver) as url:
        assert post(url) == f"{url.split('/')[2]} answered {code}"
    assert len(receiver.heard) == 1


def test_a_server_that_is_not_there_is_a_reason_and_no_exception() -> None:
    (port,) = free_ports(1)
    why = post(f"http://127.0.0.1:{port}/")
    assert why is not None and "refused" in why
