"""What bad peers and bad files do to a TLS listener."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.config import BrokerConfig
from tests.broker.network.test_tls_listeners import TlsStage
from tests.tls.authority import Authority


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_certificate_file_with_a_byte_that_is_not_ascii_does_not_stop_the_broker(
    tmp_path: Path, authority: Authority
) -> None:
    stage = TlsStage(tmp_path, authority)
    damaged = bytearray(stage.keystore.read_bytes())
    damaged[damaged.index(b"BEGIN CERTIFICATE") + 60] = 0xFF
    stage.keystore.write_bytes(damaged)
    # What a timer raises stops the broker (the handler of the loop's exceptions in process.py).
    stage.wait(3_000)
    assert len([line for _, line, _ in stage.lines if "not used" in line]) == 1
    stage.write_keystore(name="elsewhere.test")
    stage.wait(2_000)
    assert any("new connections use" in line for _, line, _ in stage.lines)


def test_passwords_are_not_in_the_text_of_a_configuration() -> None:
    """On a terminal the log shows the variables of a failed request (structlog with rich)."""
    given = {"ssl.key.password": "hunter2"}
    config, _ = BrokerConfig.load(given)
    assert "hunter2" not in repr(config)
