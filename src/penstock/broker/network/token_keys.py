"""The keys that tokens are checked with: a JSON Web Key Set in a file, or at an https URL that was allowed.

They are read on a thread, again and again, and at once (but not often) when a token names a key that is not there.
Nothing of what was read, nor of how it failed, is told to clients. While they cannot be read, the old ones stay.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.logs import Logger
from penstock.broker.network.authentication import Proven
from penstock.environment import Environment, Timer
from penstock.sasl.key_sets import read
from penstock.sasl.tokens import Key, KeysError, Rules, UnknownKey, parse_keys, verify

CHECK_INTERVAL_MS = 1_000
# Whatever tokens ask for, and while the keys cannot be read.
REFRESH_INTERVAL_MS_MIN = 10_000


class TokenKeys:
    def __init__(
        self, environment: Environment, logger: Logger, url: str, rules: Rules, *, refresh_ms: int
    ) -> None:
        """Reads a file at once, and a URL later. Raises KeysError when a file cannot be used."""
        self._environment = environment
        self._logger = logger
        self._url = url
        self._rules = rules
        self._is_file = url.startswith("file:")
        # A file costs nothing to read, and a key that was removed from it should count soon.
        self._refresh_ms = REFRESH_INTERVAL_MS_MIN if self._is_file else refresh_ms
        self._keys: tuple[Key, ...] = ()
        self._read_ms: int | None = None
        # Nothing is read before, whatever the reason.
        self._not_before_ms = 0
        self._is_reading = False
        # A token named a key that is not there. Set by threads.
        self._is_wanted = False
        self._timer: Timer | None = None
        if self._is_file:
            self._keys = parse_keys(read(url))
            self._read_ms = environment.clock.now_ms()
            self._not_before_ms = self._read_ms + REFRESH_INTERVAL_MS_MIN

    def prepare_check(self, token: str) -> Callable[[], Proven]:
        """The check of a token, for a worker thread, which raises SaslError."""
        now_ms = self._environment.clock.wall_ms()
        keys = self._keys

        def work() -> Proven:
            try:
                found = verify(token, keys, self._rules, now_ms / 1000)
            except UnknownKey:
                self._is_wanted = True
                raise
            return Proven(found.user, lifetime_ms=max(1, int(found.until_s * 1000) - now_ms))

        return work

    def watch(self) -> None:
        """From now on read the keys again when it is time."""
        now_ms = self._environment.clock.now_ms()
        age_ms = self._refresh_ms if self._read_ms is None else now_ms - self._read_ms
        is_due = age_ms >= self._refresh_ms or self._is_wanted
        if is_due and now_ms >= self._not_before_ms and not self._is_reading:
            self._is_reading = True
            self._environment.spawn.in_thread(lambda: parse_keys(read(self._url)), self._read, lane="jwks")
        self._timer = self._environment.spawn.later(CHECK_INTERVAL_MS, self.watch)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _read(self, keys: tuple[Key, ...] | None, error: Exception | None) -> None:
        self._is_reading = self._is_wanted = False
        now_ms = self._environment.clock.now_ms()
        self._not_before_ms = now_ms + REFRESH_INTERVAL_MS_MIN
        if keys is not None:
            self._keys = keys
            self._read_ms = now_ms
            return
        # It is due again as soon as it may be read.
        self._read_ms = None
        reason = str(error) if isinstance(error, KeysError) else type(error).__name__
        self._logger.error("the keys for tokens cannot be read", url=self._url, reason=reason)
