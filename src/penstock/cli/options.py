"""Options and arguments that several commands share, so that they read the same everywhere.

Names are checked here, before anybody is asked: librdkafka's answer to one that cannot be is an exception of
its own for some, waiting until a timeout for others. Most often it is a shell variable that was never set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from penstock.cli.completion import group_names, topic_names
from penstock.cli.failures import WrongUsage
from penstock.groups.settings import NAME_BYTES_MAX
from penstock.metadata.topics import name_error

Names = TypeVar("Names", str, list[str], None)

# librdkafka goes no further.
PARTITIONS_MAX = 100_000


def _checked(error_of: Callable[[str], str | None]) -> Callable[[Names], Names]:
    """What Typer calls with a name, or several, or None where none need be said."""

    def check(value: Names) -> Names:
        names: list[str] = [value] if isinstance(value, str) else value or []
        for name in names:
            if (error := error_of(name)) is not None:
                raise WrongUsage(error.removesuffix("."))
        return value

    return check


def _group_error(name: str) -> str | None:
    if not name:
        return "A group's name must not be empty"
    size = len(name.encode())
    return f"A group's name has at most {NAME_BYTES_MAX} bytes, not {size}" if size > NAME_BYTES_MAX else None


check_topic = _checked(name_error)
check_group = _checked(_group_error)

Topic = Annotated[str, typer.Argument(metavar="TOPIC", callback=check_topic, autocompletion=topic_names)]
Topics = Annotated[
    list[str], typer.Argument(metavar="TOPIC", callback=check_topic, autocompletion=topic_names)
]
Group = Annotated[str, typer.Argument(metavar="GROUP", callback=check_group, autocompletion=group_names)]
Groups = Annotated[
    list[str], typer.Argument(metavar="GROUP", callback=check_group, autocompletion=group_names)
]

BOOTSTRAP = "127.0.0.1:9092"

Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        envvar="PENSTOCK_BOOTSTRAP",
        metavar="HOST:PORT",
        help="A broker of the cluster, or several parted by commas.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
