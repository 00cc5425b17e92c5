"""The SASL of one listener: its mechanisms, and what they check clients against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.broker.listener_settings import Sasl
from penstock.broker.logs import Logger
from penstock.broker.network.authentication import Authentication, Exchange
from penstock.broker.network.sasl_exchanges import (
    OAUTHBEARER,
    PLAIN,
    SCRAM,
    BearerExchange,
    PlainExchange,
    ScramExchange,
    Users,
)
from penstock.broker.network.token_keys import TokenKeys
from penstock.environment import Environment


class ListenerSasl:
    def __init__(self, environment: Environment, logger: Logger, settings: Sasl, users: Users) -> None:
        """Read the keys for tokens, if they are in a file. Raises KeysError when they cannot be used."""
        self._settings = settings
        self._users = users
        self._token_keys: TokenKeys | None = None
        self._mechanisms: dict[str, Callable[[], Exchange]] = {}
        for name in settings.mechanisms:
            if name == PLAIN:
                self._mechanisms[name] = partial(PlainExchange, users)
            elif name == OAUTHBEARER:
                assert settings.tokens is not None
                self._token_keys = TokenKeys(
                    environment,
                    logger,
                    settings.tokens.keys_url,
                    settings.tokens.rules,
                    refresh_ms=settings.tokens.refresh_ms,
                )
                self._mechanisms[name] = partial(BearerExchange, self._token_keys.prepare_check)
            else:
                self._mechanisms[name] = partial(ScramExchange, SCRAM[name], users, environment.random)

    def authentication(self, now_ms: int) -> Authentication:
        """For a new connection."""
        return Authentication(
            self._mechanisms,
            now_ms,
            token_bytes_max=self._settings.receive_bytes_max,
            session_ms_max=self._settings.session_ms_max,
            is_current=self._users.has,
        )

    def watch(self) -> None:
        if self._token_keys is not None:
            self._token_keys.watch()

    def close(self) -> None:
        if self._token_keys is not None:
            self._token_keys.close()
