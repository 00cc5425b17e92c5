"""OAUTHBEARER (RFC 7628): the client sends a token that somebody else has issued.

Only the messages; nothing here looks into tokens.

    client                                                  server
    n,,^Aauth=Bearer TOKEN^A[KEY=VALUE^A ...]^A       ->
                                                      <-    nothing: the token is accepted
                                                      <-    {"status": ...}: it is not
    ^A                                                ->    and the server ends the exchange

The pairs after the token are SASL extensions (KIP-342).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from penstock.sasl import SaslError, decode_text

MECHANISM = "OAUTHBEARER"
# What the client sends after a refusal.
ACKNOWLEDGEMENT = b"\x01"
INVALID_TOKEN = "invalid_token"

_TOKEN = re.compile(r"[-._~+/A-Za-z0-9]+=*")
_KEY = re.compile(r"[A-Za-z]+")
_VALUE = re.compile(r"[\x21-\x7E \t\r\n]+")
_AUTH = "auth"
_STATUS = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Bearer(NamedTuple):
    """What a client sends. Its repr does not show the token."""

    token: str
    extensions: dict[str, str]

    def __repr__(self) -> str:
        return f"Bearer(extensions={sorted(self.extensions)})"


def message(token: str, extensions: Mapping[str, str] | None = None) -> bytes:
    """The client's message. Raises SaslError."""
    if not _TOKEN.fullmatch(token):
        raise SaslError("the token is empty or contains characters that a token cannot have")
    pairs = "".join(f"{key}={value}\x01" for key, value in _checked(extensions or {}).items())
    return f"n,,\x01auth=Bearer {token}\x01{pairs}\x01".encode()


def parse(message: bytes, *, authzid_allowed: str | None = None) -> Bearer:
    """The client's message. An authorization id other than the allowed one is refused. Raises SaslError."""
    text = decode_text(message)
    header, separator, rest = text.partition("\x01")
    parts = header.split(",")
    if not separator or len(parts) != 3 or parts[0] not in ("n", "y") or parts[2]:
        raise SaslError("an OAUTHBEARER message without a header")
    authzid = parts[1]
    if authzid and (authzid_allowed is None or authzid != f"a={authzid_allowed}"):
        raise SaslError("acting as another user is not supported; leave the authorization id empty")
    if not rest.endswith("\x01\x01"):
        raise SaslError("an OAUTHBEARER message that is cut short")
    pairs: dict[str, str] = {}
    for part in rest[:-2].split("\x01"):
        key, equals, value = part.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise SaslError("an OAUTHBEARER message that is malformed")
        if key in pairs:
            raise SaslError("an OAUTHBEARER message with a key twice")
        pairs[key] = value
    kind, _, token = pairs.pop(_AUTH, "").partition(" ")
    token = token.strip(" ")
    if kind.lower() != "bearer" or not _TOKEN.fullmatch(token):
        raise SaslError("an OAUTHBEARER message without a bearer token")
    return Bearer(token, pairs)


def refusal(status: str = INVALID_TOKEN, scope: str | None = None, configuration: str | None = None) -> bytes:
    """What the server answers to a token that it does not accept."""
    answer = {"status": status}
    if scope is not None:
        answer["scope"] = scope
    if configuration is not None:
        answer["openid-configuration"] = configuration
    return json.dumps(answer, separators=(",", ":")).encode()


def finish(server_final: bytes) -> None:
    """The client's look at the server's answer. After a SaslError the client sends ``ACKNOWLEDGEMENT``."""
    if not server_final:
        return
    try:
        answer = json.loads(decode_text(server_final))
        status = answer["status"]
    except (ValueError, KeyError, TypeError, RecursionError):
        status = ""
    if not isinstance(status, str) or not _STATUS.fullmatch(status):
        raise SaslError("the broker did not accept the token")
    raise SaslError(f"the broker did not accept the token: {status}")


def _checked(extensions: Mapping[str, str]) -> dict[str, str]:
    for key, value in extensions.items():
        # ``auth`` would be taken for the token (KIP-342).
        if key == _AUTH or not _KEY.fullmatch(key):
            raise SaslError("a SASL extension with a name other than letters, or called auth")
        if not _VALUE.fullmatch(value):
            raise SaslError("a SASL extension with a value that is empty or not printable")
    return dict(extensions)
