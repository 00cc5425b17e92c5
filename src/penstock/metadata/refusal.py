"""How a decision about one topic or one resource ends early: with an error for whoever asked.

It is raised and caught within one request; what leaves is the code and the message in the response.
"""

from __future__ import annotations

from penstock.protocol.errors import ErrorCode

MESSAGE_MAX = 1000


class Refusal(Exception):
    def __init__(self, error: ErrorCode, message: str | None = None) -> None:
        super().__init__(message)
        self.error = error
        # A sentence for a person; None where the code says it all. It may repeat what the client sent, and the
        # older versions of most responses have room for 32 KB.
        self.message = (
            message if message is None or len(message) <= MESSAGE_MAX else message[:MESSAGE_MAX] + "…"
        )
