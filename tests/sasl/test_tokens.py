"""Tokens: everything about them is checked, always."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt import PyJWS
from jwt.algorithms import RSAAlgorithm

from penstock.sasl import SaslError
from penstock.sasl.tokens import KEYS_BYTES_MAX, KeysError, Rules, UnknownKey, parse_keys, verify
from tests.sasl.issuer import AUDIENCE, NAME, Issuer

NOW_S = 1_800_000_000.0
RULES = Rules(NAME, ("other", AUDIENCE))
ISSUER = Issuer()
KEYS = parse_keys(ISSUER.key_set())


def refusal(token: str, rules: Rules = RULES, now_s: float = NOW_S) -> str:
    with pytest.raises(SaslError) as caught:
        verify(token, KEYS, rules, now_s)
    assert "\n" not in str(caught.value) and token[:20] not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256", "PS384", "ES256"])
def test_a_good_token_names_its_user_until_it_expires(algorithm: str) -> None:
    token = ISSUER.token(NOW_S, algorithm=algorithm)
    assert verify(token, KEYS, RULES, NOW_S) == ("alice", NOW_S + 60 + 30)


def test_another_claim_may_be_the_user() -> None:
    token = ISSUER.token(NOW_S, email="alice@example.com", sub=None)
    assert verify(token, KEYS, RULES._replace(subject="email"), NOW_S).user == "alice@example.com"
    assert refusal(token) == "the token does not name a user"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": None}, "the token is from another issuer"),
        ({"iss": NAME + "/"}, "the token is from another issuer"),
        ({"aud": None}, "the token is for another audience"),
        ({"aud": "else"}, "the token is for another audience"),
        ({"aud": ["else", "kafk"]}, "the token is for another audience"),
        ({"aud": {"kafka": 1}}, "the token is for another audience"),
        ({"exp": None}, "the token has no expiry"),
        ({"exp": NOW_S - 30}, "the token has expired"),
        ({"exp": "9999999999"}, "the token has a malformed exp"),
        ({"exp": True}, "the token has a malformed exp"),
        ({"exp": 10**400}, "the token has a malformed exp"),
        ({"nbf": NOW_S + 31}, "the token is not valid yet"),
        ({"iat": NOW_S + 31}, "the token is not valid yet"),
        ({"sub": None}, "the token does not name a user"),
        ({"sub": ""}, "the token does not name a user"),
        ({"sub": "a\nb"}, "the token does not name a user"),
        ({"sub": ["alice"]}, "the token does not name a user"),
        ({"sub": "a" * 2_000}, "the token does not name a user"),
    ],
)
def test_a_claim_that_does_not_fit_is_refused(claims: dict[str, Any], reason: str) -> None:
    _, payload, _ = ISSUER.token(NOW_S).split(".")
    decoded = json.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = {name: value for name, value in {**decoded, **claims}.items() if value is not None}
    # Signs any payload, also those that PyJWT itself would not.
    forged = PyJWS().encode(json.dumps(changed).encode(), ISSUER.ec, "ES256", {"kid": "ec"})
    assert refusal(forged) == reason


def test_clocks_may_differ_a_little() -> None:
    verify(ISSUER.token(NOW_S, exp=NOW_S - 29), KEYS, RULES, NOW_S)
    verify(ISSUER.token(NOW_S, nbf=NOW_S + 29, iat=NOW_S + 29), KEYS, RULES, NOW_S)


def test_a_token_without_a_signature_or_with_a_shared_secret_is_refused() -> None:
    for algorithm in ("none", "NONE", "HS256", "HS512", "EdDSA", "", 5, None):
        for id in ("shared", "ec"):
            assert refusal(_unsigned({"alg": algorithm, "kid": id})) == (
                "the token has an algorithm that is not accepted"
            )


def _unsigned(header: dict[str, Any]) -> str:
    _, payload, _ = ISSUER.token(NOW_S).split(".")
    encoded = base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip("=")
    return f"{encoded}.{payload}."


def test_a_forged_token_is_refused() -> None:
    header, _, signature = ISSUER.token(NOW_S).split(".")
    other = ISSUER.token(NOW_S, sub="admin").split(".")[1]
    assert refusal(f"{header}.{other}.{signature}") == "the signature of the token is wrong"
    stranger = ISSUER.token(NOW_S, key=ec.generate_private_key(ec.SECP256R1()))
    assert refusal(stranger) == "the signature of the token is wrong"


def test_only_a_key_of_the_issuer_that_fits_is_used() -> None:
    for id, algorithm in (("new", "ES256"), ("rsa", "ES256"), (None, "RS256")):
        headers: dict[str, Any] = {"kid": id} if id else {}
        token = ISSUER.token(NOW_S, algorithm=algorithm, headers=headers)
        if id is None:
            assert verify(token, KEYS, RULES, NOW_S).user == "alice"
            continue
        with pytest.raises(UnknownKey):
            verify(token, KEYS, RULES, NOW_S)
    # Extensions that must be understood.
    assert refusal(ISSUER.token(NOW_S, headers={"crit": ["x"], "x": 1})) == "the token is malformed"


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "a.b.c", "a" * 100, "eyJ.eyJ.", "\u00e9.a.b", "[" * 15_000, "e30.e30.e30"],
)
def test_rubbish_is_refused(token: str) -> None:
    with pytest.raises(SaslError):
        verify(token, KEYS, RULES, NOW_S)


def test_deep_or_long_tokens_are_refused() -> None:
    deep = base64.urlsafe_b64encode(b'{"alg":' + b"[" * 8_000).decode().rstrip("=")
    assert refusal(f"{deep}.e30.") == "the token is malformed"
    assert refusal("a" * (2 << 20)) == "a token of more than 16384 bytes"


def test_key_sets_that_cannot_be_used_are_refused_in_one_line() -> None:
    weak = {**json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key())), "kid": "w"}
    shared = {"kty": "oct", "k": "c2VjcmV0"}
    for data in (
        b"",
        b"<html>",
        b"[]",
        b'{"keys":{}}',
        b'{"keys":[]}',
        b"[" * 100_000,
        json.dumps({"keys": [shared]}).encode(),
        json.dumps({"keys": [weak]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": "x", "e": "!"}, 7, None]}).encode(),
        b" " * (KEYS_BYTES_MAX + 1),
    ):
        with pytest.raises(KeysError) as caught:
            parse_keys(data)
        assert "\n" not in str(caught.value)
