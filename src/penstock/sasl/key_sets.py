"""Reading a JSON Web Key Set from a file or from an https URL, for a worker thread."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import unquote, urlsplit

from penstock.sasl.tokens import KEYS_BYTES_MAX, KeysError

FETCH_TIMEOUT_S = 10


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Only the URL that was allowed is read."""

    def redirect_request(self, *args: object) -> None:
        return None


def read(url: str) -> bytes:
    """The content of a file: or https: URL. Waits for disk and network: for a worker thread. Raises KeysError."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "file":
            with open(os.fsdecode(unquote(parts.path)), "rb") as file:
                return file.read(KEYS_BYTES_MAX + 1)
        if parts.scheme != "https":
            raise KeysError("only file: and https: URLs are read")
        # No proxies from the environment either.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as response:
            data: bytes = response.read(KEYS_BYTES_MAX + 1)
            return data
    except urllib.error.HTTPError as error:
        # Not its text, which the server chose.
        error.close()
        raise KeysError(f"HTTP status {error.code}") from None
    except OSError as error:
        raise KeysError(f"cannot be read: {error.strerror or type(error).__name__}") from None
    except (HTTPException, ValueError) as error:
        raise KeysError(f"cannot be read: {type(error).__name__}") from None
