"""Parse KEY=VALUE arguments: --set, --config, --conf and `configs set`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cli.failures import WrongUsage


def parse_settings(
    option: str, pairs: Sequence[str], example: str = "retention.ms=3600000"
) -> dict[str, str]:
    """Parse `key=value` pairs. A value may contain `=`; a later pair wins over an earlier one."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise WrongUsage(f"{option} takes KEY=VALUE, such as {example}; got {pair!r}")
        settings[key.strip()] = value.strip()
    return settings
