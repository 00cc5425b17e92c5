"""A TLS 1.3 client that sends records which no library would send.

Python's ``ssl`` cannot send key updates or empty records. But it can write down the client's secret, and with it
this module encrypts whatever a test wants (RFC 8446, sections 5.2, 7.1 and 7.3).
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

APPLICATION_DATA, HANDSHAKE = 23, 22
KEY_UPDATE = 24


class Forger:
    """Continues the client's side after the handshake, before the client has sent any data."""

    def __init__(self, secrets: Path) -> None:
        for line in secrets.read_text().splitlines():
            if line.startswith("CLIENT_TRAFFIC_SECRET_0 "):
                self._use(bytes.fromhex(line.split()[2]))

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        # TLS_AES_256_GCM_SHA384, which OpenSSL prefers.
        assert len(secret) == 48
        self._cipher = AESGCM(_expand(secret, b"key", 32))
        self._iv = _expand(secret, b"iv", 12)
        self._sequence = 0

    def record(self, content: bytes, kind: int = APPLICATION_DATA) -> bytes:
        plaintext = content + bytes([kind])
        header = bytes([APPLICATION_DATA, 3, 3]) + (len(plaintext) + 16).to_bytes(2, "big")
        number = int.from_bytes(self._iv, "big") ^ self._sequence
        self._sequence += 1
        return header + self._cipher.encrypt(number.to_bytes(12, "big"), plaintext, header)

    def key_update(self, *, requests_another: bool) -> bytes:
        message = bytes([KEY_UPDATE, 0, 0, 1, int(requests_another)])
        record = self.record(message, HANDSHAKE)
        self._use(_expand(self._secret, b"traffic upd", 48))
        return record


def client_with_secrets(context: ssl.SSLContext, path: Path) -> ssl.SSLContext:
    context.keylog_filename = str(path)
    return context


def _expand(secret: bytes, label: bytes, size: int) -> bytes:
    full_label = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes([len(full_label)]) + full_label + b"\0"
    return hmac.new(secret, info + b"\1", hashlib.sha384).digest()[:size]
