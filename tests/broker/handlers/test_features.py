"""Feature levels as clients see and set them, on a whole broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.broker.handlers import cluster
from penstock.broker.membership.membership import Membership
from penstock.protocol.apis import CLIENT, Api, advertised
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest, FeatureUpdateKey, UpdateFeaturesRequest
from tests.broker.stage import Peer, Stage

ASKED = ApiVersionsRequest(client_software_name="test", client_software_version="1")
END_TXN, ADD_PARTITIONS, PRODUCE = 26, 24, 0


def level(response: Any) -> int | None:
    return next(
        (
            each.max_version_level
            for each in response.finalized_features
            if each.name == "transaction.version"
        ),
        None,
    )


def set_level(peer: Peer, to: int, kind: int) -> Any:
    update = FeatureUpdateKey(feature="transaction.version", max_version_level=to, upgrade_type=kind)
    return peer.call(UpdateFeaturesRequest(feature_updates=[update]), 2)


def test_a_level_that_was_set_is_in_the_next_handshake(tmp_path: Path) -> None:
    peer = Peer(Stage(tmp_path))
    first = peer.call(ASKED, 4)
    assert level(first) == 2
    assert set_level(peer, 1, kind=2).error_code == ErrorCode.NONE
    then = peer.call(ASKED, 4)
    assert level(then) == 1
    assert then.finalized_features_epoch > first.finalized_features_epoch


def test_a_level_that_cannot_be_set_is_refused_and_stays(tmp_path: Path) -> None:
    peer = Peer(Stage(tmp_path))
    refused = set_level(peer, 3, kind=1)
    assert refused.error_code == ErrorCode.INVALID_UPDATE_VERSION and refused.error_message
    assert level(peer.call(ASKED, 4)) == 2


@pytest.mark.parametrize("version", [0, 2, 3, 4])
def test_the_apis_of_transactions_are_listed_from_the_first_level_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    known = {api.key for api in advertised(CLIENT)}
    apis = [
        Api(ADD_PARTITIONS, "AddPartitionsToTxn", "transactions", 0, 5, flexible_from=3),
        Api(END_TXN, "EndTxn", "transactions", 0, 5, flexible_from=3),
    ]
    monkeypatch.setattr(
        cluster,
        "advertised",
        lambda listener: advertised(listener) + [api for api in apis if api.key not in known],
    )
    now = Peer(Stage(tmp_path / "now")).call(ASKED, version)
    assert {PRODUCE, ADD_PARTITIONS, END_TXN} <= {each.api_key for each in now.api_keys}
    # A broker of an older release, and so a cluster without a level.
    monkeypatch.setattr(Membership, "supported_features", ())
    before = Peer(Stage(tmp_path / "before")).call(ASKED, version)
    keys = {each.api_key for each in before.api_keys}
    assert PRODUCE in keys and not keys & cluster.TRANSACTION_APIS
