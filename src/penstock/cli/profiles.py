"""`penstock profiles`: the named ways to connect, without their secrets."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.completion import profile_names
from penstock.cli.connection import SERVERS
from penstock.cli.failures import WrongUsage
from penstock.cli.options import Json
from penstock.cli.output import show_json, show_table
from penstock.cli.profile_file import is_secret, profiles_path, read_profiles
from penstock.cli.subcommands import subcommands

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list"),
    help="Show the profiles for `penstock --profile NAME`. Default command: list.",
)

HIDDEN = "(hidden)"
PROTOCOL = "security.protocol"


@app.command("list")
def list_profiles(as_json: Json = False) -> None:
    """List the profiles: their brokers and protocols."""
    found = read_profiles()
    profiles = [(name, found.settings(name).values) for name in found.profiles]
    if as_json:
        document = [
            {"name": name, SERVERS: values.get(SERVERS), PROTOCOL: values.get(PROTOCOL, "plaintext")}
            for name, values in profiles
        ]
        show_json({"file": str(found.file), "profiles": document})
        return
    show_table(
        ("PROFILE", "BROKERS", "PROTOCOL"),
        [(name, values.get(SERVERS), values.get(PROTOCOL, "plaintext")) for name, values in profiles],
    )


@app.command()
def show(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", autocompletion=profile_names, help="Default: the one that --profile names."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the settings of a profile. Passwords and keys are hidden."""
    name = name or context.find_root().params.get("_profile")
    if not name:
        raise WrongUsage("which profile? See `penstock profiles list`")
    values = {
        setting: HIDDEN if is_secret(setting) else value
        for setting, value in read_profiles().settings(name).values.items()
    }
    if as_json:
        show_json({"file": str(profiles_path()), "name": name, "settings": values})
        return
    show_table(("SETTING", "VALUE"), list(values.items()))
