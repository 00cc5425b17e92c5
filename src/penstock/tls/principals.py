"""``ssl.principal.mapping.rules``: from the name in a client's certificate to the name of a user.

As Kafka documents it (KIP-371): rules in order, separated by commas, of which the first that matches is used::

    RULE:pattern/replacement/        the replacement, in which $1 stands for the first group of the pattern
    RULE:pattern/replacement/L       the same in lower case; with U, in upper case
    DEFAULT                          the whole name

A pattern has to match the whole name. A slash in a pattern or replacement is written as ``\\/``.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

# Of a distinguished name. A pattern that backtracks takes time that grows fast with the length of what it is given,
# and the name is the client's.
NAME_LENGTH_MAX = 4096

_rule = re.compile(
    r"\s*(?:(?P<default>DEFAULT)|RULE:(?P<pattern>(?:\\.|[^/\\])*)/(?P<replacement>(?:\\.|[^/\\])*)/(?P<case>[LU]?))"
    r"\s*(?:,\s*|$)",
    re.DOTALL,
)
_named_group = re.compile(r"(?<!\\)((?:\\\\)*)\(\?<(?![=!])")


class PrincipalRulesError(ValueError):
    """The rules cannot be used. The message is one line that names the setting."""


class NoRuleMatches(Exception):
    """No rule matches a client's name, so the client has no user and is refused, as Kafka does."""


class PrincipalMapping:
    def __init__(self, rules: str = "DEFAULT") -> None:
        """Raises PrincipalRulesError."""
        self._rules = _parsed(rules)

    def user(self, name: str) -> str:
        """The user of a distinguished name. Raises NoRuleMatches."""
        if len(name) > NAME_LENGTH_MAX:
            raise NoRuleMatches(f"the certificate's name has more than {NAME_LENGTH_MAX} characters")
        for rule in self._rules:
            user = name if rule is None else rule.apply(name)
            if user is not None:
                return user
        raise NoRuleMatches(f"no rule of ssl.principal.mapping.rules matches {name}")


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    # Texts and groups, in order.
    replacement: tuple[str | int, ...]
    case: str

    def apply(self, name: str) -> str | None:
        if self.pattern.fullmatch(name) is None:
            return None
        # Every match is replaced, as in Kafka, and the pattern may also match nothing at the end.
        user = self.pattern.sub(self._replace, name)
        if self.case == "L":
            return user.lower()
        if self.case == "U":
            return user.upper()
        return user

    def _replace(self, match: re.Match[str]) -> str:
        return "".join(part if isinstance(part, str) else match[part] or "" for part in self.replacement)


def _parsed(rules: str) -> list[_Rule | None]:
    found: list[_Rule | None] = []
    position = 0
    while position < len(rules.rstrip()):
        match = _rule.match(rules, position)
        if match is None:
            raise PrincipalRulesError(
                f"ssl.principal.mapping.rules: not DEFAULT or RULE:pattern/replacement/[LU]: {rules[position:]}"
            )
        position = match.end()
        if match["default"]:
            found.append(None)
            continue
        pattern = _compiled(match["pattern"].replace("\\/", "/"))
        found.append(_Rule(pattern, _replacement(match["replacement"], pattern), match["case"]))
    if not found:
        raise PrincipalRulesError("ssl.principal.mapping.rules is empty: use DEFAULT")
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    """Java's pattern as Python's. Where the two would mean different things, it is refused."""
    translated = _named_group.sub(r"\1(?P<", pattern)
    with warnings.catch_warnings():
        # Python warns of Java's classes within classes, which it does not know.
        warnings.simplefilter("error")
        try:
            # As in Java, \w and \d are ASCII.
            return re.compile(translated, re.ASCII)
        except (re.error, Warning) as error:
            raise PrincipalRulesError(
                f"ssl.principal.mapping.rules: in the pattern {pattern}: {error}"
            ) from None


def _replacement(text: str, pattern: re.Pattern[str]) -> tuple[str | int, ...]:
    """$1 is a group, with more digits if there are so many groups; \\x is the character x."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\\" and position < len(text):
            parts.append(text[position])
            position += 1
            continue
        if character != "$":
            parts.append(character)
            continue
        if named := re.compile(r"\{([a-zA-Z][a-zA-Z0-9]*)\}").match(text, position):
            if named[1] not in pattern.groupindex:
                raise PrincipalRulesError(f"ssl.principal.mapping.rules: no group {named[1]} for {text}")
            parts.append(pattern.groupindex[named[1]])
            position = named.end()
            continue
        digits = re.compile(r"[0-9]*").match(text, position)
        assert digits is not None
        sizes = [size for size in range(len(digits[0]), 0, -1) if int(digits[0][:size]) <= pattern.groups]
        if not digits[0]:
            raise PrincipalRulesError(
                f"ssl.principal.mapping.rules: $ without a number; a dollar sign is written \\$: {text}"
            )
        if not sizes:
            # Kafka takes the number of a group that does not exist for text.
            parts.append("$")
            continue
        parts.append(int(digits[0][: sizes[0]]))
        position += sizes[0]
    return tuple(parts)
