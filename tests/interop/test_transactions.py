"""Transactions with real clients: one library of each protocol generation, and in ``make interop-long`` the others.

librdkafka speaks classic transactions; Java from 4.0 on, and franz-go, speak transactions v2 (KIP-890) where the
broker has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.transactions import LIBRARIES, Clients, Library, TransactionalClient, other, parameters
from tests.interop.transactions_contract import Transacting


@pytest.fixture(scope="module")
def clients(bootstrap: str) -> Iterator[Clients]:
    clients = Clients(bootstrap)
    yield clients
    clients.close()


@pytest.fixture(scope="module", params=parameters(LIBRARIES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def library(name: str) -> Library:
    return LIBRARIES[name]


@pytest.fixture
def client(name: str, clients: Clients) -> TransactionalClient:
    return clients[name]


@pytest.fixture
def readers(name: str, clients: Clients) -> list[TransactionalClient]:
    return [clients[name], clients[other(name)]]


class TestTransactions(Transacting):
    pass
