"""Turn errors of a table's library or disk into one line that names the table.

deltalake and pyiceberg have many error types with many lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

# deltalake's arrows between causes, red on a terminal.
_COLOUR = re.compile(r"\x1b\[\d*m|↳ ?")
# The beginning of a backtrace or an SQL statement.
_REST = re.compile(r"\d+: |\[SQL:")


class TableError(RuntimeError):
    """A table cannot be read or written: it is damaged, or no archive created it."""


class _Located(Protocol):
    location: Path


_Table = TypeVar("_Table", bound=_Located)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Table, _Arguments], _Result]


def tells(
    *kinds: type[Exception],
) -> Callable[[_Method[_Table, _Arguments, _Result]], _Method[_Table, _Arguments, _Result]]:
    """Decorates a table's methods: library errors of these types become a TableError."""

    def decorated(method: _Method[_Table, _Arguments, _Result]) -> _Method[_Table, _Arguments, _Result]:
        @wraps(method)
        def told(table: _Table, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
            try:
                return method(table, *arguments, **named)
            except kinds as error:
                raise TableError(f"the table at {table.location}: {one_line(error)}") from error

        return told

    return decorated


def one_line(error: Exception) -> str:
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    return ": ".join(line for line in takewhile(lambda line: not _REST.match(line), lines) if line) or repr(
        error
    )
