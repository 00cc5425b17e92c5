"""Tables and progress bars drawn with rich, on a terminal.

Separate from ``output``, so that a command in a pipe does not pay for importing rich.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from penstock.cli.output import bytes_text

# Rich locks and formats on every update; ten updates a second are enough for the eye.
REDRAW_INTERVAL_S = 0.1
# A shortened column keeps at least this width.
COLUMN_WIDTH_MIN = 8
# Border and padding of a column.
GAP = 3


def draw_table(
    columns: Sequence[str],
    texts: list[list[str]],
    numeric: Sequence[bool],
    title: str | None,
    *,
    shorten: bool,
) -> None:
    console = Console()
    widths = [
        max([cell_len(column), *(cell_len(row[index]) for row in texts)])
        for index, column in enumerate(columns)
    ]
    if shorten:
        widths = fitted(widths, console.width - GAP * len(columns))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, right, width in zip(columns, numeric, widths):
        table.add_column(
            column, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=width
        )
    for row in texts:
        # Text, not str: rich would read markup in a topic or a key.
        table.add_row(*(Text(cell) for cell in row))
    console.width = max(console.width, sum(widths) + GAP * len(columns))
    console.print(table)


def fitted(widths: Sequence[int], room: int) -> list[int]:
    """Column widths, with the widest shrunk until all fit or none is wider than COLUMN_WIDTH_MIN."""
    fitted = list(widths)
    while sum(fitted) > room and (widest := max(fitted)) > COLUMN_WIDTH_MIN:
        fitted[fitted.index(widest)] -= 1
    return fitted


class Bar:
    """A progress bar that is cheap to update for every record: it redraws at most every REDRAW_INTERVAL_S."""

    def __init__(self, progress: Progress, description: str, total: int | None, *, of_bytes: bool) -> None:
        self._text: Callable[[float], str] = bytes_text if of_bytes else "{:,.0f}".format
        self._progress = progress
        self._task = progress.add_task(description, total=total, rate="")
        self._started = time.monotonic()
        self._redraw_at = self._started + REDRAW_INTERVAL_S

    def show(self, completed: int) -> None:
        now = time.monotonic()
        if now >= self._redraw_at:
            self._redraw_at = now + REDRAW_INTERVAL_S
            rate = f"{self._text(completed / (now - self._started))}/s"
            self._progress.update(self._task, completed=completed, rate=rate)


@contextmanager
def progress_bar(description: str, total: int | None, *, of_bytes: bool = False) -> Iterator[Bar]:
    with progress(of_bytes=of_bytes) as drawn:
        yield Bar(drawn, description, total, of_bytes=of_bytes)


def progress(*, of_bytes: bool = False) -> Progress:
    """A bar on stderr (stdout is for the result), removed when done; not drawn without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
