"""The one line of Java's ``sasl.jaas.config`` that clients need: a login module, a name and a password.

    org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="secret";

Nothing is loaded by the name of a class (CVE-2023-25194 is about Java clients that do): two names are known, and
everything else is refused. Errors never show any of the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PACKAGE = "org.apache.kafka.common.security."
# Login module -> which mechanisms it is for.
MODULES = {f"{_PACKAGE}plain.PlainLoginModule": "PLAIN", f"{_PACKAGE}scram.ScramLoginModule": "SCRAM"}
EXAMPLE = f'{_PACKAGE}scram.ScramLoginModule required username="..." password="...";'

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<word>[A-Za-z0-9_.$-]+)
      | "(?P<double>(?:[^"\\\r\n]|\\[^\r\n])*)"
      | '(?P<single>(?:[^'\\\r\n]|\\[^\r\n])*)'
      | (?P<mark>[=;])
    )""",
    re.VERBOSE,
)
# What Java's tokenizer makes of a backslash and a letter. Octal numbers are refused.
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


class JaasError(ValueError):
    """One line, without any of the text."""


class Login(NamedTuple):
    # PLAIN or SCRAM.
    family: str
    user: str
    password: str

    def __repr__(self) -> str:
        return f"Login({self.family})"


def parse(text: str) -> Login:
    """Raises JaasError."""
    tokens = _tokens(text)
    words = [each for _, each in tokens]
    if len(tokens) < 3 or tokens[0][0] != "word" or tokens[-1] != ("mark", ";"):
        raise JaasError(f"not a line such as {EXAMPLE}")
    family = MODULES.get(words[0])
    if family is None:
        raise JaasError("only ScramLoginModule and PlainLoginModule of Kafka are supported")
    if words[1] != "required":
        raise JaasError("the login module must be followed by: required")
    options: dict[str, str] = {}
    rest = tokens[2:-1]
    if len(rest) % 3:
        raise JaasError(f"not a line such as {EXAMPLE}")
    for (kind, name), equals, (value_kind, value) in zip(rest[::3], rest[1::3], rest[2::3]):
        if kind != "word" or equals != ("mark", "=") or value_kind == "mark":
            raise JaasError(f"not a line such as {EXAMPLE}; one login module, and every option once")
        if name not in ("username", "password"):
            raise JaasError("an option other than username and password is not supported")
        if name in options:
            raise JaasError(f"{name} is there twice")
        options[name] = value
    for name in ("username", "password"):
        if not options.get(name):
            raise JaasError(f"{name} is missing")
    return Login(family, options["username"], options["password"])


def line(mechanism: str, user: str, password: str) -> str:
    """The line for a user, as Java's clients and ``parse`` read it."""
    module = next(name for name, family in MODULES.items() if mechanism.startswith(family))
    return f"{module} required username={_quoted(user)} password={_quoted(password)};"


def _quoted(text: str) -> str:
    for letter, character in [("\\", "\\"), ('"', '"'), *_ESCAPES.items()]:
        text = text.replace(character, f"\\{letter}")
    return f'"{text}"'


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise JaasError(f"not a line such as {EXAMPLE}; put values into double quotes")
        kind = match.lastgroup
        assert kind is not None
        value = match[kind]
        found.append((kind, value if kind in ("word", "mark") else _unescaped(value)))
        place = match.end()
    return found


def _unescaped(text: str) -> str:
    if re.search(r"\\[0-7]", text.replace("\\\\", "")):
        raise JaasError("a backslash with a number is not supported; write the character itself")
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text)
