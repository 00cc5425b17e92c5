"""PLAIN: one message with name and password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sasl import SaslError, plain

WORDS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)


@given(WORDS, WORDS)
def test_message_says_name_and_password(user: str, password: str) -> None:
    assert plain.parse(plain.message(user, password)) == ("", user, password)


def test_message_is_the_one_of_the_rfc() -> None:
    assert plain.message("tim", "tanstaaftanstaaf") == b"\0tim\0tanstaaftanstaaf"


def test_authorization_id_may_only_be_the_user() -> None:
    assert plain.parse(b"tim\0tim\0x") == ("tim", "tim", "x")
    with pytest.raises(SaslError, match="another user"):
        plain.parse(b"Ursel\0Kurt\0xipj3plmq")


@pytest.mark.parametrize(
    "message",
    [b"", b"tim", b"\0tim", b"\0tim\0", b"\0\0secret", b"\0tim\0sec\0ret", b"\0tim\0\xff", b"\0" * 20_000],
)
def test_malformed_message_is_refused_without_its_password(message: bytes) -> None:
    with pytest.raises(SaslError) as refused:
        plain.parse(message)
    assert "sec" not in str(refused.value)


@pytest.mark.parametrize(
    ("user", "password"), [("", "x"), ("a\0b", "x"), ("a", ""), ("a", "x\0"), ("a", "\ud800")]
)
def test_client_does_not_send_what_no_server_can_read(user: str, password: str) -> None:
    with pytest.raises(SaslError):
        plain.message(user, password)
