"""Certificates for the tests of this directory, made once."""

from __future__ import annotations

import pytest

from tests.tls.authority import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="session")
def other_authority() -> Authority:
    return Authority()
