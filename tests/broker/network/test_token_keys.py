"""Where the keys for tokens are read from: a file, or the one https URL, and nowhere else."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.sasl.key_sets import read
from penstock.sasl.tokens import KEYS_BYTES_MAX, KeysError
from tests.tls.authority import Authority


class Answers(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "/keys")
            self.end_headers()
            return
        if self.path == "/secret":
            self.send_response(500, "secret-reason")
            self.end_headers()
            self.wfile.write(b"secret-body")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"k" * (10 if self.path == "/keys" else 3 * KEYS_BYTES_MAX))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    authority = Authority()
    chain, key = authority.issue("127.0.0.1", is_host=True)
    keystore, authorities = tmp_path / "server.pem", tmp_path / "ca.pem"
    keystore.write_text(key + chain)
    authorities.write_text(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keystore)
    http = HTTPServer(("127.0.0.1", 0), Answers)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    http.handle_error = lambda request, client: None  # type: ignore[assignment, method-assign]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Answers.asked = []
    # Where Python looks for the authorities that the system trusts.
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    try:
        yield f"https://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def refusal(url: str) -> str:
    with pytest.raises(KeysError) as caught:
        read(url)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_keys_are_read_from_the_url_itself_and_up_to_a_limit(server: str) -> None:
    assert read(f"{server}/keys") == b"k" * 10
    assert len(read(f"{server}/huge")) == KEYS_BYTES_MAX + 1
    Answers.asked.clear()
    assert refusal(f"{server}/away") == "HTTP status 302"
    assert refusal(f"{server}/secret") == "HTTP status 500"
    assert Answers.asked == ["/away", "/secret"], "the redirect is not followed"


def test_a_server_that_is_not_trusted_is_not_read(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "cannot be read" in refusal(f"{server}/keys")
    assert Answers.asked == []


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    assert refusal(f"file://{tmp_path}/absent") == "cannot be read: No such file or directory"
    assert refusal("http://127.0.0.1:1/keys") == "only file: and https: URLs are read"
    assert refusal("ftp://127.0.0.1/keys") == "only file: and https: URLs are read"
    assert "cannot be read" in refusal("https://127.0.0.1:1/keys")
    assert "cannot be read" in refusal("https://[broken/keys")
