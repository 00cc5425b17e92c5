"""OAUTHBEARER: the message with the token, its extensions, and the refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sasl import SaslError, oauthbearer

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl-_"


def test_message_carries_token_and_extensions() -> None:
    message = oauthbearer.message(TOKEN, {"logicalCluster": "lkc-1", "traceId": "a b"})
    assert message == f"n,,\x01auth=Bearer {TOKEN}\x01logicalCluster=lkc-1\x01traceId=a b\x01\x01".encode()
    assert oauthbearer.parse(message) == (TOKEN, {"logicalCluster": "lkc-1", "traceId": "a b"})
    assert TOKEN not in repr(oauthbearer.parse(message))


@given(
    st.dictionaries(
        st.text("abcXYZ", min_size=1).filter(lambda key: key != "auth"),
        st.text("abc =,\t~!", min_size=1),
    )
)
def test_extensions_arrive_as_they_were_sent(extensions: dict[str, str]) -> None:
    assert oauthbearer.parse(oauthbearer.message(TOKEN, extensions)).extensions == extensions


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "header"),
        (b"n,,", "header"),
        (b"p=tls,,\x01auth=Bearer a\x01\x01", "header"),
        (b"n,a=admin,\x01auth=Bearer a\x01\x01", "another user"),
        (b"n,,\x01auth=Bearer a\x01", "cut short"),
        (b"n,,\x01\x01\x01", "malformed"),
        (b"n,,\x01auth=Basic a\x01\x01", "without a bearer token"),
        (b"n,,\x01auth=Bearer\x01\x01", "without a bearer token"),
        (b"n,,\x01auth=Bearer a b\x01\x01", "without a bearer token"),
        (b"n,,\x01x=y\x01\x01", "without a bearer token"),
        (b"n,,\x01auth=Bearer a\x01auth=Bearer b\x01\x01", "twice"),
        (b"n,,\x01auth=Bearer a\x01x1=y\x01\x01", "malformed"),
        (b"n,,\x01auth=Bearer a\x01x=\x01\x01", "malformed"),
        (b"n,,\x01auth=Bearer \xff\x01\x01", "UTF-8"),
    ],
)
def test_malformed_message_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(SaslError, match=why):
        oauthbearer.parse(message)


def test_authorization_id_may_be_the_one_that_the_server_expects() -> None:
    message = b"n,a=alice,\x01auth=bearer abc\x01\x01"
    assert oauthbearer.parse(message, authzid_allowed="alice").token == "abc"


@pytest.mark.parametrize("extensions", [{"auth": "x"}, {"a1": "x"}, {"a": ""}, {"a": "x\x01y"}, {"": "x"}])
def test_extensions_that_would_break_the_message_are_not_sent(extensions: dict[str, str]) -> None:
    with pytest.raises(SaslError, match="extension"):
        oauthbearer.message(TOKEN, extensions)


@pytest.mark.parametrize("token", ["", "a b", "a\x01b", "a\n"])
def test_token_that_would_break_the_message_is_not_sent_or_shown(token: str) -> None:
    with pytest.raises(SaslError, match="the token is empty or contains"):
        oauthbearer.message(token)


def test_refusal_is_read_by_the_client() -> None:
    assert json.loads(oauthbearer.refusal(scope="s", configuration="https://x")) == {
        "status": "invalid_token",
        "scope": "s",
        "openid-configuration": "https://x",
    }
    with pytest.raises(SaslError, match=r"did not accept the token: invalid_token$"):
        oauthbearer.finish(oauthbearer.refusal())
    for garbage in (b"{}", b"x", b'{"status": 5}', b'{"status": "a\\nb"}', b"[" * 10_000):
        with pytest.raises(SaslError, match=r"did not accept the token$"):
            oauthbearer.finish(garbage)
    oauthbearer.finish(b"")
