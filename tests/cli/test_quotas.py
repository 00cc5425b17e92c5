"""`penstock quotas` against a broker that keeps quotas as ours does; how they are enforced is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.metadata.features import SECURITY
from penstock.metadata.image import Image
from penstock.metadata.quotas import alter_client_quotas, describe_client_quotas
from penstock.protocol.messages.quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)
from tests.cli.conftest import Outcome, Penstock
from tests.cli.fake_broker import FakeBroker


class Cluster:
    def __init__(self, penstock: Penstock) -> None:
        self._penstock = penstock
        self.image = replace(Image(), features={SECURITY: 1})
        self.broker = FakeBroker(api_48=self._describe, api_49=self._alter)

    def _describe(self, request: DescribeClientQuotasRequest) -> DescribeClientQuotasResponse:
        return describe_client_quotas(request, self.image.security.quotas)

    def _alter(self, request: AlterClientQuotasRequest) -> AlterClientQuotasResponse:
        changes, response = alter_client_quotas(request, self.image)
        if not request.validate_only:
            self.image, _ = self.image.apply(changes)
        return response

    def __call__(self, *words: str) -> Outcome:
        return self._penstock("quotas", *words, "--bootstrap", self.broker.bootstrap)


@pytest.fixture
def quotas(penstock: Penstock) -> Iterator[Cluster]:
    cluster = Cluster(penstock)
    with cluster.broker:
        yield cluster


def test_quotas_are_set_listed_and_removed(quotas: Cluster) -> None:
    outcome = quotas("set", "--user", "alice", "producer_byte_rate=1048576", "request_percentage=12.5")
    assert (outcome.code, outcome.out) == (
        0,
        "set producer_byte_rate=1048576, request_percentage=12.5 for user alice\n",
    )
    both = ("--user", "<default>", "--client-id", "app")
    assert quotas("set", *both, "consumer_byte_rate=5").out == (
        "set consumer_byte_rate=5 for user <default> and client-id app\n"
    )
    assert quotas("set", "--ip", "10.0.0.1", "connection_creation_rate=2").code == 0
    assert quotas("--json").json == [
        {"entity": {"client-id": "app", "user": "<default>"}, "quotas": {"consumer_byte_rate": 5.0}},
        {"entity": {"ip": "10.0.0.1"}, "quotas": {"connection_creation_rate": 2.0}},
        {
            "entity": {"user": "alice"},
            "quotas": {"producer_byte_rate": 1048576.0, "request_percentage": 12.5},
        },
    ]
    listed = quotas("list", "--user", "alice").out.splitlines()
    assert [line.split() for line in listed] == [
        ["USER", "CLIENT", "ID", "IP", "QUOTA", "VALUE"],
        ["alice", "producer_byte_rate", "1048576"],
        ["alice", "request_percentage", "12.5"],
    ]
    removed = quotas("remove", "--user", "alice", "request_percentage", "--json").json
    assert removed == {"entity": {"user": "alice"}, "removed": ["request_percentage"], "dry_run": False}
    assert quotas("remove", "--user", "alice").out == "removed producer_byte_rate of user alice\n"
    assert quotas("list", "--user", "alice", "--json").json == []
    assert len(quotas("--json").json) == 2


def test_a_dry_run_changes_nothing(quotas: Cluster) -> None:
    outcome = quotas("set", "--client-id", "<default>", "producer_byte_rate=7", "--dry-run")
    assert outcome.out == "could set producer_byte_rate=7 for client-id <default>\n"
    assert quotas("--json").json == []


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("set", "producer_byte_rate=7"), 2, "say whose quotas: --user, --client-id, both, or --ip"),
        (
            ("set", "--ip", "10.0.0.1", "--user", "a", "producer_byte_rate=7"),
            2,
            "--ip cannot be combined with --user or --client-id",
        ),
        (("set", "--user", "", "producer_byte_rate=7"), 2, "a name must not be empty"),
        (("set", "--user", "a", "producer_byte_rate"), 2, "quotas set takes KEY=VALUE"),
        (("set", "--user", "a", "producer_byte_rate=much"), 2, "producer_byte_rate is a number"),
        (
            ("set", "--user", "a", "producer_byte_rate=-1"),
            1,
            "could not change the quotas of user a: producer_byte_rate must be greater than 0",
        ),
        (("set", "--user", "a", "speed=1"), 1, "There is no quota 'speed' of this entity"),
        (("remove", "--user", "a"), 1, "user a has no quotas; see `penstock quotas list`"),
        (("remove", "--user", "a", "speed"), 1, "user a has no speed; see `penstock quotas list`"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    quotas: Cluster, words: tuple[str, ...], code: int, line: str
) -> None:
    outcome = quotas(*words)
    assert outcome.code == code
    assert line in outcome.err and len(outcome.err.splitlines()) == 1
