"""Where Spark's driver is to be found."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import pytest

from penstock.spark import _be_found


def test_a_machine_that_cannot_resolve_its_own_name_is_found_by_its_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("SPARK_LOCAL_IP", "")
    monkeypatch.delenv("SPARK_LOCAL_IP")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    _be_found()
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"

    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.7")
    _be_found()
    assert os.environ["SPARK_LOCAL_IP"] == "10.0.0.7", "who said where is left alone"
