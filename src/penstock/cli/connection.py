"""How a command reaches a cluster: the addresses of brokers, and security settings with librdkafka's names.

They come from a properties file, a profile (``profile_file.py``), and the environment, where
PENSTOCK_SSL_CA_LOCATION is ssl.ca.location. ``options.py`` says which of them wins; this module reads and merges
them.

The file is that of librdkafka's clients: lines of NAME=VALUE, `#` for comments, and a backslash at the end of a
line that goes on. Errors name the file, the line and the setting, and never a value.
"""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.cli.failures import WrongUsage
from penstock.sasl.settings import SaslSettings
from penstock.tls.pem import Pem

SERVERS = "bootstrap.servers"
FILE_BYTES_MAX = 4 * 1024 * 1024
_ENVIRONMENT = "PENSTOCK_"
# What begins like this in the environment is one of ours, so a name that is not known is a mistake.
_ENVIRONMENT_PREFIXES = tuple(f"{_ENVIRONMENT}{word}_" for word in ("SECURITY", "SSL", "SASL", "ENABLE"))
# Settings of which only one can be set: a stronger source that has one replaces all of them.
_ALTERNATIVES = (
    ("ssl.ca.location", "ssl.ca.pem"),
    ("ssl.certificate.location", "ssl.certificate.pem"),
    ("ssl.key.location", "ssl.key.pem"),
    ("sasl.mechanism", "sasl.mechanisms"),
)
_PROTOCOL = "security.protocol"
_HOST_CHECK = "ssl.endpoint.identification.algorithm"
# What could be a setting. Anything else may be a line of a key, which must not be repeated in an error.
_name = re.compile(r"[a-z][a-z0-9._]{0,63}")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What one source says, unchecked but for the names."""

    # For errors.
    source: str
    # With SERVERS, if it has them.
    values: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What all sources say together."""

    servers: str | None
    # As librdkafka takes them.
    security: Mapping[str, str] = field(repr=False)
    # None: without TLS.
    context: ssl.SSLContext | None = field(repr=False, compare=False)
    # None: without SASL.
    sasl: SaslSettings | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Brokers:
    # HOST:PORT,...
    servers: str
    security: Mapping[str, str] = field(default_factory=dict, repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    sasl: SaslSettings | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.servers


def read_client_file(path: str) -> ClientSettings:
    """Raises WrongUsage."""
    from penstock.wire.errors import BadSecurity  # noqa: PLC0415  # all of the wire client

    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX).decode()
    except OSError as error:
        raise WrongUsage(f"--config {path}: {error.strerror or 'cannot be read'}") from None
    except UnicodeDecodeError:
        raise WrongUsage(f"--config {path}: not a text file with lines of NAME=VALUE") from None
    values: dict[str, str] = {}
    for number, line in _lines(text):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not _name.fullmatch(name):
            raise WrongUsage(
                f"{path}, line {number}: not NAME=VALUE with a name such as security.protocol; "
                "end a line with a backslash if the next one belongs to it"
            )
        try:
            check_setting(name)
        except BadSecurity as error:
            raise WrongUsage(f"{path}, line {number}: {error}") from None
        values[name] = plain_value(name, value)
    return ClientSettings(path, values)


def read_environment(environment: Mapping[str, str]) -> ClientSettings | None:
    """The security settings in the environment, if there are any. Raises WrongUsage."""
    found = {
        name: value for name, value in environment.items() if name.startswith(_ENVIRONMENT_PREFIXES) and value
    }
    if not found:
        return None
    from penstock.wire.security import SECURITY_NAMES  # noqa: PLC0415  # all of the wire client

    known = {_ENVIRONMENT + name.upper().replace(".", "_"): name for name in SECURITY_NAMES}
    values = {}
    for variable, value in found.items():
        if variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)[0]
            raise WrongUsage(f"unknown environment variable {variable}; did you mean {near}?")
        values[known[variable]] = plain_value(known[variable], value)
    return ClientSettings(f"{_ENVIRONMENT}* in the environment", values)


def check_setting(name: str) -> None:
    """Raises BadSecurity for a name that is none of ours."""
    from penstock.wire.security import SECURITY_NAMES, check_names  # noqa: PLC0415  # all of the wire client

    check_names([name], (SERVERS, *SECURITY_NAMES))


def plain_value(name: str, value: str) -> str:
    """A value that was written in one line."""
    return value.replace("\\n", "\n") if name.endswith(".pem") else value


def merge(*sources: ClientSettings) -> ClientConfig:
    """What the sources say together, the strongest first. Reads the certificates that they name.

    Raises WrongUsage.
    """
    from penstock.wire.errors import BadSecurity  # noqa: PLC0415  # all of the wire client
    from penstock.wire.security import client_context, client_security  # noqa: PLC0415

    values: dict[str, str] = {}
    for source in sources:
        replaced = {name for group in _ALTERNATIVES if not values.keys().isdisjoint(group) for name in group}
        for name, value in source.values.items():
            if name not in values and name not in replaced:
                values[name] = value
    if not values.get(_PROTOCOL, "").strip().lower().startswith("sasl_"):
        # A user and password in the environment are for clusters that ask for them. Beside a protocol of the same
        # source they are a mistake, which is found below.
        chosen = next((each.values for each in sources if _PROTOCOL in each.values), None)
        for name in [name for name in values if name.startswith("sasl.") and chosen is not None]:
            if name not in (chosen or {}):
                del values[name]
    servers = values.pop(SERVERS, None) or None
    try:
        security = client_security(values)
        context = client_context(security)
    except BadSecurity as error:
        raise WrongUsage(f"{' and '.join(each.source for each in sources)}: {error}") from None
    is_plain = security.tls is None and security.sasl is None
    return ClientConfig(servers, {} if is_plain else _for_librdkafka(values), context, security.sasl)


def load_client_config(path: str) -> ClientConfig:
    """What one file says by itself. Raises WrongUsage."""
    return merge(read_client_file(path))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, each with the number of its first one."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not parts:
            if not stripped or stripped.startswith(("#", "!")):
                continue
            begun = number
        if stripped.endswith("\\"):
            parts.append(stripped[:-1])
            continue
        yield begun, " ".join([*parts, stripped])
        parts = []
    if parts:
        yield begun, " ".join(parts)


def _for_librdkafka(values: Mapping[str, str]) -> dict[str, str]:
    """The same settings where librdkafka is stricter than we are."""
    found = {name: value for name, value in values.items() if value}
    found["security.protocol"] = found["security.protocol"].lower()
    for name in ("sasl.mechanism", "sasl.mechanisms"):
        if name in found:
            found[name] = found[name].upper()
    if values.get(_HOST_CHECK) == "":
        # As Java's clients write it.
        found[_HOST_CHECK] = "none"
    for name, value in found.items():
        if name.endswith(".pem"):
            # In one line of a file its newlines were spaces.
            found[name] = "".join(block.text for block in Pem(name, inline=value).blocks())
    return found
