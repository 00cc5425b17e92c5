"""Command groups with a default subcommand, and hints for subcommands that live elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import typer.core

from penstock.cli.failures import WrongUsage


class Subcommands(typer.core.TyperGroup):
    """A command group that runs ``default`` when no subcommand is given. Make one with ``subcommands``."""

    default: ClassVar[str]
    elsewhere: ClassVar[Mapping[str, str]]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else None
        is_named = first is not None and (not first.startswith("-") or first in ctx.help_option_names)
        if not is_named and not ctx.resilient_parsing:
            for word in args:
                if word in self.commands:
                    raise WrongUsage(f"write {first} after `{word}`, not before it")
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.elsewhere and not ctx.resilient_parsing:
            raise WrongUsage(f"No such command {args[0]!r}; use {self.elsewhere[args[0]]}")
        return super().resolve_command(ctx, args)


def subcommands(default: str, elsewhere: Mapping[str, str] | None = None) -> type[Subcommands]:
    """A class for ``typer.Typer(cls=...)``; ``elsewhere`` maps a missing subcommand to the command to use."""
    return type("Subcommands", (Subcommands,), {"default": default, "elsewhere": elsewhere or {}})
