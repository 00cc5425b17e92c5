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
# and with how often the texts between its groups are in it, such as ",OU=". The name is the client's, and the whole
# broker waits for the pattern. The example in Kafka's documentation takes 5 s for a name of 724 characters and 160
# attributes; of 400 names at these limits the worst took 28 ms.
NAME_LENGTH_MAX = 512
ATTRIBUTES_MAX = 32

_part = r"(?:\\/|[^/])*"
_rule = re.compile(
    rf"\s*(?:DEFAULT|RULE:(?P<pattern>{_part})/(?P<replacement>{_part})/(?P<case>[LU]?))\s*(?:,\s*|$)"
)
_group_name = re.compile(r"\{([a-zA-Z][a-zA-Z0-9]*)\}")
_digits = re.compile(r"[0-9]*")
_named_group = re.compile(r"(?<!\\)((?:\\\\)*)\(\?<(?![=!])")


class PrincipalRulesError(ValueError):
    """The rules cannot be used. The message is one line that names the setting."""


class NoRuleMatches(Exception):
    """No rule matches a client's name, or it is too long. The client has no user and is refused, as Kafka does."""


class PrincipalMapping:
    def __init__(self, rules: str = "DEFAULT") -> None:
        """Raises PrincipalRulesError."""
        self._rules = _parsed(rules)

    def user(self, name: str) -> str:
        """The user of a distinguished name. Raises NoRuleMatches."""
        if len(name) > NAME_LENGTH_MAX:
            raise NoRuleMatches(f"the certificate's name has more than {NAME_LENGTH_MAX} characters")
        # Each attribute has one equals sign that is not escaped.
        if name.count("=") - name.count("\\=") > ATTRIBUTES_MAX:
            raise NoRuleMatches(f"the certificate's name has more than {ATTRIBUTES_MAX} attributes")
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
        if match["pattern"] is None:
            found.append(None)
            continue
        pattern = _compiled(match["pattern"])
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
    """$1 is the first group, ${name} a named one, and a backslash makes the next character text."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\\":
            if position == len(text):
                raise PrincipalRulesError(
                    f"ssl.principal.mapping.rules: a backslash is written \\\\ in the text {text}"
                )
            parts.append(text[position])
            position += 1
        elif character != "$":
            parts.append(character)
        elif named := _group_name.match(text, position):
            if named[1] not in pattern.groupindex:
                raise PrincipalRulesError(
                    f"ssl.principal.mapping.rules: the pattern has no group {named[1]} for the replacement {text}"
                )
            parts.append(pattern.groupindex[named[1]])
            position = named.end()
        else:
            number = _digits.match(text, position)
            if number is None or not number[0]:
                raise PrincipalRulesError(
                    f"ssl.principal.mapping.rules: $ without a number, which is written \\$, in the text {text}"
                )
            size = _group_digits(number[0], pattern.groups)
            # Kafka takes the number of a group that does not exist for text.
            parts.append(int(number[0][:size]) if size else "$")
            position += size
    return tuple(parts)


def _group_digits(digits: str, groups: int) -> int:
    """How many of the digits are the number of a group, as Java reads them; 0 if there is no such group."""
    if int(digits[0]) > groups:
        return 0
    size = 1
    while size < len(digits) and int(digits[: size + 1]) <= groups:
        size += 1
    return size
