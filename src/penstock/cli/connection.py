"""How a command reaches a cluster: the addresses of brokers, and security settings from a properties file.

The file is that of librdkafka's clients: lines of NAME=VALUE with librdkafka's names, `#` for comments, and a
backslash at the end of a line that goes on. Errors name the file, the line and the setting, and never a value.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.cli.failures import WrongUsage
from penstock.sasl.settings import SaslSettings
from penstock.tls.pem import Pem

SERVERS = "bootstrap.servers"
FILE_BYTES_MAX = 4 * 1024 * 1024
_HOST_CHECK = "ssl.endpoint.identification.algorithm"
# What could be a setting. Anything else may be a line of a key, which must not be repeated in an error.
_name = re.compile(r"[a-z][a-z0-9._]{0,63}")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The content of a file."""

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


def load_client_config(path: str) -> ClientConfig:
    """Read a file, and the certificates that it names. Raises WrongUsage."""
    # These import all of the wire client, and most commands have no file.
    from penstock.wire.errors import BadSecurity  # noqa: PLC0415
    from penstock.wire.security import SECURITY_NAMES, check_names, client_context, client_security  # noqa: PLC0415

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
            check_names([name], (SERVERS, *SECURITY_NAMES))
        except BadSecurity as error:
            raise WrongUsage(f"{path}, line {number}: {error}") from None
        values[name] = value.replace("\\n", "\n") if name.endswith(".pem") else value
    servers = values.pop(SERVERS, None) or None
    try:
        security = client_security(values)
        context = client_context(security)
    except BadSecurity as error:
        raise WrongUsage(f"{path}: {error}") from None
    is_plain = security.tls is None and security.sasl is None
    return ClientConfig(servers, {} if is_plain else _for_librdkafka(values), context, security.sasl)


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
