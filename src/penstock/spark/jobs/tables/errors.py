"""What a table's library or its disk says when it fails, as one line that names the table.

deltalake and pyiceberg have errors of many kinds and many lines. Whoever archives wants to know which table it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

# deltalake's arrows from a cause to the next, red on a terminal.
_COLOUR = re.compile(r"\x1b\[\d*m|↳ ?")
# Where a backtrace begins, or a statement of SQL.
_REST = re.compile(r"\d+: |\[SQL:")


class TableError(RuntimeError):
    """A table that cannot be read or written: it is damaged, or no archive made it."""


class _Located(Protocol):
    location: Path


_Table = TypeVar("_Table", bound=_Located)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Table, _Arguments], _Result]


def tells(
    *kinds: type[Exception],
) -> Callable[[_Method[_Table, _Arguments, _Result]], _Method[_Table, _Arguments, _Result]]:
    """For methods of a table: errors of a library, of these kinds, become a TableError."""

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
