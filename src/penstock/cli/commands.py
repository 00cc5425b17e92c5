"""The commands that Typer parses, each in the module of its name, imported only when it is used.

`serve` is listed here for help and completion only: ``main`` dispatches it before Typer is imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from penstock import __version__
from penstock.cli.completion import profile_names
from penstock.cli.failures import Failure, WrongUsage, near_name
from penstock.cli.serve import SUMMARY as SERVE_SUMMARY

# In the order of the help.
COMMANDS = (
    "serve",
    "dev",
    "topics",
    "produce",
    "consume",
    "groups",
    "transactions",
    "configs",
    "users",
    "acls",
    "quotas",
    "doctor",
    "brokers",
    "quorum",
    "features",
    "profiles",
    "sim",
    "bench",
    "capacity",
    "tls",
    "spark",
)

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

_serve = typer.Typer(add_completion=False)


@_serve.command("serve", help=SERVE_SUMMARY)
def _never_called() -> None:
    raise AssertionError("serve is dispatched before Typer")


class Commands(typer.core.TyperGroup):
    """Imports a command's module on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        application = (
            _serve if cmd_name == "serve" else importlib.import_module(f"penstock.cli.{cmd_name}").app
        )
        command = typer.main.get_command(application)
        command.name = cmd_name
        without_types_of_flags(command, ctx)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "serve" and not ctx.resilient_parsing:
            # Only an option before it leads here.
            raise WrongUsage("a broker has no profile; write `penstock serve` without options before `serve`")
        # Typer suggests names only from the commands it has loaded, which are none here.
        near = near_name(args[0], COMMANDS)
        if near and args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise WrongUsage(f"No such command {args[0]!r}, did you mean {near!r}? See `penstock --help`")
        return super().resolve_command(ctx, args)


def without_types_of_flags(command: Any, context: Any) -> None:
    """Hide the type of flags in the help: Typer would write `<bool>` after every `--json`."""
    options = list(command.params)
    if context is not None:
        options.append(command.get_help_option(context))
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for each in getattr(command, "commands", {}).values():
        without_types_of_flags(each, context)


app = typer.Typer(
    cls=Commands,
    help="A distributed message queue that speaks the Kafka protocol.",
    epilog="PENSTOCK_BOOTSTRAP, PENSTOCK_CONFIG and PENSTOCK_PROFILE set the defaults of --bootstrap, --config and "
    "--profile.",
    invoke_without_command=True,
    context_settings=CONTEXT,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    # Used by ``options.Bootstrap``.
    _profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar="PENSTOCK_PROFILE",
            metavar="NAME",
            autocompletion=profile_names,
            help="How to connect, from the file of profiles. See `penstock profiles`.",
        ),
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def dispatch(words: list[str]) -> int:
    """Parse and run. A command returns its exit code, or None for 0."""
    command = typer.main.get_command(app)
    without_types_of_flags(command, typer.Context(command, **CONTEXT))
    try:
        result = command.main(args=words, prog_name="penstock", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as leaving:
        # Typer exits this way on a broken pipe, and has silenced the streams already.
        return leaving.code if isinstance(leaving.code, int) else 1
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Failure(f"{where}{error.strerror or error}") from None
    except Exception as error:
        if (refusal := _refusal(error)) is None:
            raise
        raise refusal from None
    return result if isinstance(result, int) else 0


def _refusal(error: Exception) -> Failure | WrongUsage | None:
    """A library's error as one of ours; None for an unexpected error, which is a bug."""
    # Typer has a private copy of click, whose exception classes have no public name; duck-type them.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "penstock"
        if getattr(error, "option_name", None) == "--profile":
            return WrongUsage(
                "write --profile NAME before the command: `penstock --profile NAME topics list`"
            )
        message = error.format_message().strip().rstrip(".").replace("Value error, ", "")
        return WrongUsage(f"{message}; see `{where} --help`")
    if "confluent_kafka" in sys.modules:
        from penstock.cli.client import explain  # noqa: PLC0415  # imports librdkafka

        if (line := explain(error)) is not None:
            return Failure(line)
    return None
