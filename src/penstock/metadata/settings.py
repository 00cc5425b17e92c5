"""The definition of a setting: type, limits, default, and whether Penstock implements it.

Settings keep Kafka's names, defaults and meanings. They are listed in ``topic_settings.py`` and
``broker_settings.py``; ``configs.py`` decides which value is effective (topic, broker, file, default).

Values are text everywhere except in the typed objects of ``broker/config.py``: clients send text and expect text
back. A refused setting is refused only with a value other than its default: ``compression.type=producer`` is
accepted, and ``compression.type=zstd`` gets an error with the reason.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Any, NamedTuple

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
DOUBLE_MAX = sys.float_info.max
# A value must fit, in UTF-8, in the older versions of DescribeConfigs.
TEXT_MAX = 32_767 // 4
# A password is never shown. Certificates are passwords in this sense, and long.
PASSWORD_TEXT_MAX = 256 * 1024


class Kind(IntEnum):
    """Types of settings, with the numbers of DescribeConfigs."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    # Never shown, neither in responses nor in errors.
    PASSWORD = 9


_BITS = {Kind.SHORT: 16, Kind.INT: 32, Kind.LONG: 64}


class Status(Enum):
    IMPLEMENTED = "implemented"
    # Known from Kafka, accepted with a warning, without effect.
    WITHOUT_MEANING = "without meaning"
    # A value other than the default would promise something Penstock does not do (yet).
    REFUSED = "refused"


class Setting(NamedTuple):
    name: str
    kind: Kind
    # As text; None when there is no default, and another setting or the broker itself decides.
    default: str | None
    # One sentence for users; may be empty if there is a reason.
    doc: str
    # Numbers: the smallest and the largest value allowed, inclusive.
    low: float | None = None
    high: float | None = None
    # Strings and elements of lists: the allowed values; empty if any value is allowed.
    choices: tuple[str, ...] = ()
    status: Status = Status.IMPLEMENTED
    # Why it is refused, or why it has no effect.
    reason: str = ""
    # Broker settings: whether AlterConfigs may change it while the broker runs.
    is_dynamic: bool = False

    @property
    def is_sensitive(self) -> bool:
        return self.kind is Kind.PASSWORD


class InvalidSetting(Exception):
    """A value that a setting cannot have. The message is one line for the user who set it."""


def parse(setting: Setting, text: str) -> Any:
    """The typed value of a setting's text, parsed as Kafka does. Raises InvalidSetting.

    The types are bool, str, int, float, and a tuple of str for a list.
    """
    length_max = PASSWORD_TEXT_MAX if setting.is_sensitive else TEXT_MAX
    if len(text) > length_max:
        raise InvalidSetting(f"{setting.name}: a value has at most {length_max} characters, not {len(text)}")
    text = text.strip()
    kind = setting.kind
    if kind is Kind.BOOLEAN:
        if text.lower() not in ("true", "false"):
            raise InvalidSetting(f"{_shown(setting, text)}: must be true or false")
        return text.lower() == "true"
    if kind is Kind.PASSWORD:
        return text
    if kind is Kind.STRING:
        if setting.choices and text not in setting.choices:
            raise InvalidSetting(f"{_shown(setting, text)}: must be one of {', '.join(setting.choices)}")
        return text
    if kind is Kind.LIST:
        # Repeated elements count once, as in Kafka since 4.2 (KIP-1161).
        elements = tuple(dict.fromkeys(split_list(text)))
        if setting.choices and text and not all(map(str.strip, text.split(","))):
            raise InvalidSetting(f"{_shown(setting, text)}: a list must not have empty elements")
        if setting.choices and not set(elements).issubset(setting.choices):
            raise InvalidSetting(f"{_shown(setting, text)}: must be made of {', '.join(setting.choices)}")
        return elements
    return _number(setting, text)


def check(setting: Setting, text: str, *, internal: bool = False) -> None:
    """Raise InvalidSetting for a value that is malformed or refused.

    Internal topics (``internal``) may have values that users' topics may not have yet.
    """
    value = parse(setting, text)
    if setting.status is not Status.REFUSED or internal:
        return
    if setting.default is None:
        # The value may be a password: do not repeat it.
        raise InvalidSetting(f"{setting.name}: {setting.reason}")
    if value != parse(setting, setting.default):
        raise InvalidSetting(f"{_shown(setting, text)}: {setting.reason}")


def format_value(value: Any) -> str:
    """The text that ``parse`` turns into this value, in the form Kafka's tools show."""
    match value:
        case bool():
            return "true" if value else "false"
        case tuple():
            return ",".join(value)
        case float():
            return str(value).replace("e+", "E").replace("e", "E")
        case _:
            return str(value)


def documentation(setting: Setting) -> str:
    match setting.status:
        case Status.IMPLEMENTED:
            return setting.doc
        case Status.REFUSED:
            return f"{setting.doc} Other values are refused: {setting.reason}."
        case Status.WITHOUT_MEANING:
            return f"{setting.doc} Accepted without effect: {setting.reason}.".lstrip()


def split_list(text: str) -> list[str]:
    """The elements of a list as Kafka writes it: split at commas, trimmed, no empty ones."""
    return [element for element in map(str.strip, text.split(",")) if element]


def _number(setting: Setting, text: str) -> int | float:
    value: int | float
    if setting.kind is Kind.DOUBLE:
        try:
            # Python alone allows underscores between digits.
            value = float(text.replace("_", "?"))
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise InvalidSetting(f"{_shown(setting, text)}: must be a number")
    else:
        digits = text[1:] if text[:1] in ("+", "-") else text
        if not (digits.isascii() and digits.isdigit()):
            raise InvalidSetting(f"{_shown(setting, text)}: must be a whole number")
        bits = _BITS[setting.kind]
        # Nineteen digits hold any 64-bit number; converting very long ones costs quadratic time.
        if len(digits.lstrip("0")) > 19 or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
            raise InvalidSetting(f"{_shown(setting, text)}: does not fit in {bits} bits")
        value = int(text)
    if setting.low is not None and value < setting.low:
        raise InvalidSetting(f"{_shown(setting, text)}: must be at least {setting.low}")
    if setting.high is not None and value > setting.high:
        raise InvalidSetting(f"{_shown(setting, text)}: must be at most {setting.high}")
    return value


def _shown(setting: Setting, text: str) -> str:
    # A client may send megabytes; the message goes back to it and into the log.
    return f"{setting.name}={text if len(text) <= 80 else text[:77] + '...'}"


# Constructors for the tables of settings.


def boolean(name: str, default: bool, doc: str) -> Setting:
    return Setting(name, Kind.BOOLEAN, "true" if default else "false", doc)


def string(name: str, default: str | None, doc: str, *choices: str) -> Setting:
    return Setting(name, Kind.STRING, default, doc, choices=choices)


def password(name: str, doc: str) -> Setting:
    return Setting(name, Kind.PASSWORD, None, doc)


def strings(name: str, default: str | None, doc: str, *choices: str) -> Setting:
    return Setting(name, Kind.LIST, default, doc, choices=choices)


def short(name: str, default: int, doc: str, low: int | None = None) -> Setting:
    return Setting(name, Kind.SHORT, str(default), doc, low)


def integer(
    name: str, default: int | None, doc: str, low: int | None = None, high: int | None = None
) -> Setting:
    return Setting(name, Kind.INT, None if default is None else str(default), doc, low, high)


def long(name: str, default: int | None, doc: str, low: int | None = None) -> Setting:
    return Setting(name, Kind.LONG, None if default is None else str(default), doc, low)


def double(
    name: str, default: float, doc: str, low: float | None = None, high: float | None = None
) -> Setting:
    return Setting(name, Kind.DOUBLE, format_value(default), doc, low, high)


def dynamic(*settings: Setting) -> Iterable[Setting]:
    return [setting._replace(is_dynamic=True) for setting in settings]


def without_meaning(reason: str, *settings: Setting) -> Iterable[Setting]:
    return [setting._replace(status=Status.WITHOUT_MEANING, reason=reason) for setting in settings]


def refused(reason: str, *settings: Setting) -> Iterable[Setting]:
    return [setting._replace(status=Status.REFUSED, reason=reason) for setting in settings]


def table(*settings: Setting) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}
