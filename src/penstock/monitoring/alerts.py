"""Alerts: which findings are new and which are gone since the last alert, and posting that to a webhook.

An alert that could not be delivered is not forgotten: the next one is again the difference from the last that was.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.monitoring.findings import Finding, Severity

TIMEOUT_S = 5.0
TRIES = 3
PAUSE_S = 1.0
SCHEMES = ("http", "https")
# Answers after which a repetition may succeed.
TOO_MANY, SERVER_ERROR = 429, 500


@dataclass(frozen=True, slots=True)
class Change:
    new: tuple[Finding, ...]
    resolved: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.new or self.resolved)


class Alerts:
    """Compares findings by rule, subject and severity: other words for the same trouble are not news."""

    def __init__(self) -> None:
        self._delivered: dict[tuple[str, str, Severity], Finding] = {}

    def change(self, findings: Iterable[Finding]) -> Change:
        now = self._by_identity(findings)
        return Change(
            tuple(each for identity, each in now.items() if identity not in self._delivered),
            tuple(each for identity, each in self._delivered.items() if identity not in now),
        )

    def delivered(self, findings: Iterable[Finding]) -> None:
        self._delivered = self._by_identity(findings)

    @staticmethod
    def _by_identity(findings: Iterable[Finding]) -> dict[tuple[str, str, Severity], Finding]:
        return {
            (each.rule, each.subject, each.severity): each
            for each in findings
            if each.severity > Severity.INFO
        }


def finding_document(each: Finding) -> dict[str, Any]:
    return {**asdict(each), "severity": each.severity.name.lower()}


def alert_document(
    cluster: str, time_text: str | None, change: Change, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "time": time_text,
        "new": [finding_document(each) for each in change.new],
        "resolved": [finding_document(each) for each in change.resolved],
        "findings": [finding_document(each) for each in findings],
    }


def check_url(url: str) -> None:
    """Raises ValueError unless alerts can be posted there."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in SCHEMES or not parts.hostname or not port_is_valid:
        raise ValueError(
            "write a URL such as https://alerts.example.com/hook; only http and https are allowed"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError("a user and password in the URL are not supported")
    if not url.isascii() or any(each.isspace() or not each.isprintable() for each in url):
        raise ValueError("the URL has a space or another character that must be escaped")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An alert goes where it was sent, or not at all."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError for a URL that cannot be posted to."""
        check_url(url)
        self._url = url
        self._timeout_s = timeout_s
        self._pause = pause
        self._opener = urllib.request.build_opener(_NoRedirects)
        # Without its path and query, which may be secret.
        self.host = urlsplit(url).netloc

    def post(self, document: Any) -> str | None:
        """Post JSON, a few times if necessary. Returns why it was not accepted; never raises for that."""
        data = json.dumps(document).encode()
        why = ""
        for attempt in range(TRIES):
            if attempt:
                self._pause(PAUSE_S * 2 ** (attempt - 1))
            request = urllib.request.Request(
                self._url, data, {"Content-Type": "application/json", "User-Agent": "penstock-doctor"}
            )
            try:
                with self._opener.open(request, timeout=self._timeout_s):
                    return None
            except urllib.error.HTTPError as error:
                error.close()
                why = f"{self.host} answered {error.code}"
                if error.code != TOO_MANY and error.code < SERVER_ERROR:
                    return why
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", None) or error
                why = f"{self.host}: {getattr(reason, 'strerror', None) or reason}"
        return why
