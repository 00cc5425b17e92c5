"""Options and arguments that several commands share.

Names are validated here, before any request: librdkafka raises its own exception for some invalid names and waits
for a timeout with others. The usual cause is an unset shell variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from penstock.cli.completion import group_names, topic_names
from penstock.cli.connection import Brokers, ClientSettings, merge, read_client_file, read_environment
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


# How strongly something was said, in Typer's words.
_STRENGTHS = ("DEFAULT", "ENVIRONMENT", "COMMANDLINE")
_BY_ENVIRONMENT, _BY_COMMAND_LINE = 1, 2


def _strength(context: Any, name: str) -> int:
    return _STRENGTHS.index(getattr(context.get_parameter_source(name), "name", "DEFAULT"))


def _chosen(context: typer.Context, value: Brokers) -> Brokers:
    """The brokers to connect to, and how.

    What is on the command line wins over the environment. Of a file and a profile only one is used. On the same
    level, --bootstrap wins over the servers that it names, and PENSTOCK_SSL_* and the like over its security
    settings. If it was chosen on the command line, they only add what it leaves out.
    """
    base, strength = _file_or_profile(context)
    environment = read_environment(os.environ)
    if base is None and environment is None:
        return value
    sources = [environment, base] if strength < _BY_COMMAND_LINE else [base, environment]
    config = merge(*(each for each in sources if each is not None))
    servers = value.servers
    if config.servers is not None and _strength(context, "bootstrap") < max(strength, _BY_ENVIRONMENT):
        servers = config.servers
    return Brokers(servers, config.security, config.context, config.sasl)


def _file_or_profile(context: typer.Context) -> tuple[ClientSettings | None, int]:
    file: ClientSettings | None = context.params.get("_config")
    file_strength = _strength(context, "_config")
    root = context.find_root()
    profile: str | None = root.params.get("_profile")
    profile_strength = _strength(root, "_profile")
    if file is not None and profile is not None and file_strength == profile_strength:
        names = ("--config", "--profile")
        if file_strength < _BY_COMMAND_LINE:
            names = ("PENSTOCK_CONFIG", "PENSTOCK_PROFILE")
        raise WrongUsage(f"{names[0]} and {names[1]} both say how to connect; give one of them")
    if profile is None or file_strength > profile_strength:
        return file, file_strength
    from penstock.cli.profile_file import load_profile  # noqa: PLC0415  # most commands have none

    return load_profile(profile), profile_strength


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
        parser=read_client_file,
        # Before --bootstrap, which is completed from it.
        is_eager=True,
        help="A file with bootstrap.servers, security.protocol, ssl.* and sasl.* settings.",
    )


# Commands need not use it: it is part of ``Bootstrap``. The second name is that of Kafka's tools.
Config = Annotated[ClientSettings | None, _config_option("--config", "--command-config")]
# For commands with another --config.
CommandConfig = Annotated[ClientSettings | None, _config_option("--command-config")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
