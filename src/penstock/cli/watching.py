"""`--watch`: show something again and again until Ctrl-C."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from penstock.cli.output import printable, show_json
from penstock.wire import WireError

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")]
Interval = Annotated[
    float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="The time between two of them.")
]

# Clears a terminal and goes to its upper left.
CLEAR = "\x1b[H\x1b[2J"


def watch(show: Callable[[], object], interval_s: float) -> NoReturn:
    """An error of the cluster is a line on standard error: the next turn may succeed."""
    while True:
        due = time.monotonic() + interval_s
        try:
            show()
        except WireError as error:
            warn(str(error))
        sys.stdout.flush()
        time.sleep(max(0.0, due - time.monotonic()))


def begin_screen() -> None:
    """Before each table of a watch: on a terminal they replace each other, elsewhere a line is between them."""
    if sys.stdout.isatty():
        sys.stdout.write(CLEAR)
    else:
        print()


def show_document(document: Any, *, is_watching: bool) -> None:
    """One JSON document; in a watch one line, so that each can be read by itself."""
    if is_watching:
        print(json.dumps(document, ensure_ascii=False))
    else:
        show_json(document)


def warn(text: str) -> None:
    print(f"penstock: {printable(' '.join(text.split()))}", file=sys.stderr)
