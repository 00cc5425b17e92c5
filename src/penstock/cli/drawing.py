"""What is drawn on a terminal with rich: tables and progress bars.

Apart from ``output`` so that a command whose answer goes into a pipe does not pay for importing rich.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# Rich locks and formats on every update; ten times a second is as much as anybody sees.
REDRAW_INTERVAL_S = 0.1


def draw_table(
    columns: Sequence[str], texts: list[list[str]], numeric: Sequence[bool], title: str | None
) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, right in zip(columns, numeric):
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in texts:
        # Text, not str: a topic or a key may hold what rich would read as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


class Bar:
    """A progress bar that may be told of every record: it looks at the clock, and draws seldom."""

    def __init__(self, progress: Progress, description: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total, rate="")
        self._started = time.monotonic()
        self._redraw_at = self._started + REDRAW_INTERVAL_S

    def show(self, completed: int) -> None:
        now = time.monotonic()
        if now >= self._redraw_at:
            self._redraw_at = now + REDRAW_INTERVAL_S
            rate = f"{completed / (now - self._started):,.0f}/s"
            self._progress.update(self._task, completed=completed, rate=rate)


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Bar]:
    with progress() as drawn:
        yield Bar(drawn, description, total)


def progress() -> Progress:
    """On stderr (stdout is the command's answer), gone when done; invisible without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
