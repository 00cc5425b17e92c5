"""Options and arguments that several commands share.

Names are validated here, before any request: librdkafka raises its own exception for some invalid names and waits
for a timeout with others. The usual cause is an unset shell variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from penstock.cli.completion import group_names, topic_names
from penstock.cli.connection import Brokers, ClientConfig, load_client_config
from penstock.cli.failures import WrongUsage
from penstock.groups.settings import NAME_BYTES_MAX
from penstock.metadata.topics import name_error

Names = TypeVar("Names", str, list[str], None)

# librdkafka's limit.
PARTITIONS_MAX = 100_000


def _checked(error_of: Callable[[str], str | None]) -> Callable[[Names], Names]:
    """A Typer callback for one name, a list of names, or None for an optional one."""

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


def _chosen(context: typer.Context, value: Brokers) -> Brokers:
    """The brokers to connect to.

    The command line wins over the environment, and in both --bootstrap wins over the file.
    """
    config: ClientConfig | None = context.params.get("_config")
    if config is None:
        return value
    servers, order = value.servers, ("DEFAULT", "ENVIRONMENT", "COMMANDLINE")
    given, file_given = (
        order.index(getattr(context.get_parameter_source(name), "name", "DEFAULT"))
        for name in ("bootstrap", "_config")
    )
    if config.servers is not None and given < max(file_given, 1):
        servers = config.servers
    return Brokers(servers, config.security, config.context, config.sasl)


# Parsed like an argument.
BOOTSTRAP: Any = "127.0.0.1:9092"

Bootstrap = Annotated[
    Brokers,
    typer.Option(
        "--bootstrap",
        envvar="PENSTOCK_BOOTSTRAP",
        metavar="HOST:PORT",
        parser=Brokers,
        callback=_chosen,
        help="One or more brokers of the cluster, separated by commas.",
    ),
]


def _config_option(*names: str) -> Any:
    return typer.Option(
        *names,
        envvar="PENSTOCK_CONFIG",
        metavar="FILE",
        parser=load_client_config,
        # Before --bootstrap, which is completed from it.
        is_eager=True,
        help="A file with bootstrap.servers, security.protocol, ssl.* and sasl.* settings.",
    )


# Commands need not use it: it is part of ``Bootstrap``. The second name is that of Kafka's tools.
Config = Annotated[ClientConfig | None, _config_option("--config", "--command-config")]
# For commands with another --config.
CommandConfig = Annotated[ClientConfig | None, _config_option("--command-config")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
