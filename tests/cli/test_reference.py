"""The reference page names everything the command line takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli import commands as cli_commands
from tests.cli.conftest import Penstock

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        words = f"{path} {name}".strip()
        if hasattr(command, "list_commands"):
            yield from commands(command, words)
        else:
            yield words, command


COMMANDS = dict(commands(typer.main.get_command(cli_commands.app)))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_an_example(words: str) -> None:
    assert f"penstock {words}" in PAGE.read_text()


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_is_named(words: str) -> None:
    page = PAGE.read_text()
    options = {option for each in COMMANDS[words].params for option in each.opts if option.startswith("--")}
    assert {option for option in options if option not in page} == set()


def test_every_option_of_serving_is_named(penstock: Penstock) -> None:
    page = PAGE.read_text()
    options = set(re.findall("--[a-z-]+", penstock("serve", "--help").out))
    assert {option for option in options if option not in page} == set()
