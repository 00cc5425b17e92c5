"""The certificates of a listener or client, which may change while it runs.

The owner asks from a timer whether the files have changed. New connections get the new context; existing ones go on
with theirs. Whoever replaces the files may be half done, so files that do not fit together change nothing. They are
tried again each time, changed or not, because the reason may have been elsewhere, such as too many open files.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from penstock.tls.pem import FileVersion, TlsSettingsError, decoded
from penstock.tls.settings import TlsSettings, make_context
from penstock.tls.x509 import expiry_ms

# Warn this long before the certificate expires.
WARN_DAYS = 30
_DAY_MS = 24 * 3_600_000


class Certificates:
    def __init__(
        self,
        settings: TlsSettings,
        *,
        server_side: bool = True,
        report: Callable[[str], None] | None = None,
        warn_days: int = WARN_DAYS,
    ) -> None:
        """Load the files. ``report`` gets one line for each file that is unwise or, later, cannot be used.

        Raises TlsSettingsError if they cannot be used now.
        """
        self.settings = settings
        self.server_side = server_side
        self.warn_days = warn_days
        self._report = report
        # Of the files that the context was made of.
        self._versions = self._current_versions()
        # Why the files that are there now are not used, as reported. None if they are used.
        self._failure: str | None = None
        # For new connections.
        self.context: ssl.SSLContext
        # Wall time; None without a certificate of our own.
        self.expires_ms: int | None
        self.context, self.expires_ms = self._load()

    def reload(self) -> bool:
        """Load the files again if they have changed. True if there is a new context."""
        versions = self._current_versions()
        if versions == self._versions:
            self._failure = None
            return False
        try:
            self.context, self.expires_ms = self._load()
        # TlsSettingsError is a ValueError. Others are not expected, but no file may stop a broker that runs.
        except (ValueError, OSError) as error:
            failure = str(error)
            if failure != self._failure:
                self._failure = failure
                self._say(f"the changed certificates are not used: {failure}")
            return False
        self._versions = versions
        self._failure = None
        return True

    def days_left(self, wall_ms: int) -> int | None:
        """Whole days until the certificate expires, negative if it has; None without a certificate."""
        return None if self.expires_ms is None else (self.expires_ms - wall_ms) // _DAY_MS

    def expiry_warning(self, wall_ms: int) -> str | None:
        """A line to log if the certificate expires within ``warn_days``."""
        days = self.days_left(wall_ms)
        if days is None or days >= self.warn_days:
            return None
        what = f"{self.settings.chain}: the certificate"
        if days < 0:
            return f"{what} has expired"
        return f"{what} expires in {days} day{'' if days == 1 else 's'}"

    def _current_versions(self) -> tuple[FileVersion | None, ...]:
        return tuple(pem.version() for pem in self.settings.files)

    def _load(self) -> tuple[ssl.SSLContext, int | None]:
        # Said only of files that are used, because others are tried again and again.
        warnings: list[str] = []
        context = make_context(self.settings, self.server_side, warn=warnings.append)
        expires_ms = self._expiry_ms()
        for warning in warnings:
            self._say(warning)
        return context, expires_ms

    def _expiry_ms(self) -> int | None:
        chain = self.settings.chain
        if chain is None:
            return None
        certificate = decoded(chain.certificates()[0])
        try:
            return expiry_ms(certificate)
        except ValueError as error:
            raise TlsSettingsError(f"{chain}: {error}") from None

    def _say(self, line: str) -> None:
        if self._report is not None:
            self._report(line)
