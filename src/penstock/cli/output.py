"""Command output: tables, JSON and confirmation prompts.

On a terminal a table is drawn with rich. In a pipe it is plain aligned columns, one line per row of any width, for
grep and awk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from penstock.cli.failures import Failure

Cell: TypeAlias = str | int | float | None

# An empty cell of a table; null in JSON.
NOTHING = "-"


def show_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str | None = None,
    shorten: bool = False,
) -> None:
    """Print rows, one line each; a column of numbers is right-aligned.

    A row wider than the terminal wraps, so that an address or an id can be copied whole. ``shorten`` cuts cells
    instead, for records of any length.
    """
    body = list(rows)
    numeric = [
        bool(body) and all(isinstance(row[index], int | float | None) for row in body)
        for index in range(len(columns))
    ]
    texts = [[_text(cell) for cell in row] for row in body]
    title = None if title is None else printable(title)
    if sys.stdout.isatty():
        from penstock.cli.drawing import draw_table  # noqa: PLC0415  # rich, only to draw

        draw_table(columns, texts, numeric, title, shorten=shorten)
    else:
        _align(columns, texts, numeric, title)


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation. Raises Failure unless the answer is yes or ``yes`` is set."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"{question} There is no terminal to ask on; pass --yes to confirm")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Failure("nothing was done")


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def bytes_text(amount: float) -> str:
    """Bytes in decimal units with three digits: 86.4 TB, 3 GB, 512 B."""
    return scaled_text(amount, ("B", "KB", "MB", "GB", "TB", "PB", "EB"))


def scaled_text(amount: float, units: Sequence[str]) -> str:
    step = 0
    while step < len(units) - 1 and amount >= 999.5:  # 999.5 would round to four digits
        amount /= 1000
        step += 1
    digits = 0 if step == 0 or amount >= 100 else 1 if amount >= 10 else 2
    text = f"{amount:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {units[step]}".rstrip()


def printable(text: str) -> str:
    """Control characters as escapes: names come from any client, and must not reach the terminal as commands."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def _text(cell: Cell) -> str:
    if cell is None:
        return NOTHING
    return f"{cell:g}" if isinstance(cell, float) else printable(str(cell))


def _align(
    columns: Sequence[str], texts: list[list[str]], numeric: Sequence[bool], title: str | None
) -> None:
    if title is not None:
        print(title)
    lines = [list(columns), *texts]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        cells = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric)
        )
        print("  ".join(cells).rstrip())
