"""PLAIN (RFC 4616): the client sends name and password as they are, so it belongs on TLS.

One message, ``[AUTHZID] NUL USER NUL PASSWORD``, which the server answers with nothing.
"""

from __future__ import annotations

from penstock.sasl import SaslError, decode_text, encode_text


def message(user: str, password: str) -> bytes:
    """The client's message. Raises SaslError."""
    if not user or "\0" in user:
        raise SaslError("the user name is empty or contains a zero byte")
    if not password or "\0" in password:
        raise SaslError("the password is empty or contains a zero byte")
    return b"\0" + encode_text(user, "user name") + b"\0" + encode_text(password, "password")


def parse(message: bytes) -> tuple[str, str, str]:
    """Authorization id, user and password. The first is empty or the user. Raises SaslError."""
    parts = decode_text(message).split("\0")
    if len(parts) != 3:
        raise SaslError("a PLAIN message that is not made of three parts")
    authzid, user, password = parts
    if not user:
        raise SaslError("a PLAIN message without a user name")
    if not password:
        raise SaslError("a PLAIN message without a password")
    if authzid not in ("", user):
        raise SaslError("acting as another user is not supported; leave the authorization id empty")
    return authzid, user, password
