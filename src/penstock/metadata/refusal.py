"""The error that ends a decision about one topic or one resource.

It is raised and caught within one request; its code and message go into the response.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode

MESSAGE_MAX = 1000


class Refusal(Exception):
    def __init__(self, error: ErrorCode, message: str | None = None) -> None:
        super().__init__(message)
        self.error = error
        # A sentence for the user; None where the code is enough. It may repeat what the client sent, and the
        # older versions of most responses have room for 32 KB only.
        self.message = (
            message if message is None or len(message) <= MESSAGE_MAX else message[:MESSAGE_MAX] + "…"
        )
