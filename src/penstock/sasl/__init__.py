"""SASL without connections: how a client proves who it is, from both sides.

``scram`` and ``plain`` prove a password, ``oauthbearer`` carries a token. Each of them turns messages into
messages; the caller sends them in SaslAuthenticate requests, and provides nonces and stored keys. Nothing here
normalises names or passwords (SASLprep): Kafka and librdkafka use the bytes as they are, and so do we.

Imports the standard library only, so brokers and clients can both use it.
"""

from __future__ import annotations

# Far above any real message, and small enough that parsing one costs nothing.
MESSAGE_BYTES_MAX = 16 * 1024


class SaslError(Exception):
    """The exchange failed. One line, which may be shown to the peer and in logs: it contains no secret."""


def decode_text(message: bytes) -> str:
    """A message as text. Raises SaslError."""
    if len(message) > MESSAGE_BYTES_MAX:
        raise SaslError(f"a SASL message of more than {MESSAGE_BYTES_MAX} bytes")
    try:
        return bytes(message).decode()
    except UnicodeDecodeError:
        # Its own message would contain the bytes.
        raise SaslError("a SASL message that is not UTF-8") from None


def encode_text(text: str, what: str) -> bytes:
    """Text of a user as bytes. Raises SaslError with ``what`` it is, and not the text."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise SaslError(f"the {what} cannot be written as UTF-8") from None
