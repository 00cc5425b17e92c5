"""How a client authenticates: the ``sasl.*`` settings under librdkafka's names and under Java's.

Errors name settings, and never contain values of names other than the mechanism's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.sasl import SaslError, encode_text, jaas, oauthbearer
from penstock.sasl.scram import HASHES

PLAIN = "PLAIN"
MECHANISMS = (PLAIN, *HASHES, oauthbearer.MECHANISM)
# librdkafka knows its mechanism by two names.
LIBRDKAFKA_NAMES = ("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password")
KAFKA_NAMES = ("sasl.mechanism", "sasl.jaas.config")
SECRET_NAMES = ("sasl.password", "sasl.jaas.config")

# Returns a token that is valid now. Called for each connection.
TokenSource = Callable[[], str]


class SaslSettingsError(ValueError):
    """One line that names the setting, without its value."""


@dataclass(frozen=True, slots=True)
class SaslSettings:
    mechanism: str
    # For PLAIN and SCRAM.
    user: str = ""
    password: str = field(default="", repr=False)
    # For OAUTHBEARER.
    token: TokenSource | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.mechanism in MECHANISMS
        assert (self.token is not None) == (self.mechanism == oauthbearer.MECHANISM)

    @classmethod
    def from_librdkafka(cls, values: Mapping[str, str], token: TokenSource | None = None) -> SaslSettings:
        """Raises SaslSettingsError."""
        named = [values[name].strip() for name in ("sasl.mechanism", "sasl.mechanisms") if values.get(name)]
        if len({each.upper() for each in named}) > 1:
            raise SaslSettingsError(
                "sasl.mechanism and sasl.mechanisms are two names of one setting, and differ"
            )
        mechanism = _mechanism(named[0] if named else "")
        if mechanism == oauthbearer.MECHANISM:
            if token is None:
                raise SaslSettingsError(
                    f"sasl.mechanism={mechanism} needs a function that returns tokens, which only Python can give: "
                    "penstock.wire.Client(..., token=...)"
                )
            return cls(mechanism, token=token)
        if token is not None:
            raise SaslSettingsError(f"sasl.mechanism={mechanism} has no use for tokens; use OAUTHBEARER")
        user, password = values.get("sasl.username", ""), values.get("sasl.password", "")
        for name, value in (("sasl.username", user), ("sasl.password", password)):
            if not value:
                raise SaslSettingsError(f"{name} is missing: {mechanism} needs a user and a password")
        return cls(mechanism, _text("sasl.username", user), _text("sasl.password", password))

    @classmethod
    def from_kafka(cls, values: Mapping[str, str]) -> SaslSettings:
        """From the settings of Java's clients. Raises SaslSettingsError."""
        mechanism = _mechanism(values.get("sasl.mechanism", ""))
        if mechanism == oauthbearer.MECHANISM:
            raise SaslSettingsError(f"sasl.mechanism: {mechanism} is not supported here; use PLAIN or SCRAM")
        if not values.get("sasl.jaas.config"):
            raise SaslSettingsError(f"sasl.jaas.config is missing; write {jaas.EXAMPLE}")
        try:
            login = jaas.parse(values["sasl.jaas.config"])
        except jaas.JaasError as error:
            raise SaslSettingsError(f"sasl.jaas.config: {error}") from None
        if not mechanism.startswith(login.family):
            raise SaslSettingsError(f"sasl.jaas.config: this login module is not for {mechanism}")
        return cls(
            mechanism, _text("sasl.jaas.config", login.user), _text("sasl.jaas.config", login.password)
        )

    @property
    def who(self) -> str:
        """For messages."""
        return f"user {self.user}" if self.user else "the token"


def _mechanism(text: str) -> str:
    mechanism = text.strip().upper()
    choice = "use SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN"
    if not mechanism:
        raise SaslSettingsError(f"sasl.mechanism is missing; {choice}")
    if mechanism not in MECHANISMS:
        known = mechanism.replace("-", "").replace("_", "").isalnum() and len(mechanism) <= 20
        raise SaslSettingsError(
            f"sasl.mechanism: {mechanism if known else 'this'} is not supported; {choice}"
        )
    return mechanism


def _text(name: str, value: str) -> str:
    try:
        encode_text(value, "value")
    except SaslError:
        raise SaslSettingsError(f"{name} cannot be written as UTF-8") from None
    if "\0" in value:
        raise SaslSettingsError(f"{name} contains a zero byte")
    return value
