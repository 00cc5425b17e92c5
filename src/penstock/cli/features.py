"""`penstock features`: the feature levels of the cluster, and setting one (KIP-584).

A level is one for the whole cluster. The range that a broker supports is that of its release, so the range shown is
the one of the broker that was asked.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json
from penstock.cli.output import show_json, show_table
from penstock.cli.raw import RawClient, refuse
from penstock.cli.subcommands import subcommands
from penstock.protocol.messages.cluster import (
    ApiVersionsRequest,
    FeatureUpdateKey,
    UpdateFeaturesRequest,
)

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list"),
    help="Show and set the feature levels of the cluster. Default command: list.",
)

LEVEL_MAX = 2**15 - 1
UPGRADE, SAFE_DOWNGRADE = 1, 2


@app.command("list")
def show(bootstrap: Bootstrap = BOOTSTRAP, _config: Config = None, as_json: Json = False) -> None:
    """List the features, the levels that the broker supports, and the level in use."""
    with RawClient(bootstrap) as client:
        features = _described(client)
    if as_json:
        show_json({"features": features})
        return
    show_table(
        ("FEATURE", "SUPPORTED", "LEVEL"),
        [(each["name"], _range_text(each["min"], each["max"]), each["level"]) for each in features],
    )


@app.command("set")
def set_level(
    name: Annotated[str, typer.Argument(metavar="FEATURE", help="Such as transaction.version.")],
    level: Annotated[int, typer.Argument(metavar="LEVEL", min=0, max=LEVEL_MAX)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say whether it could be set, change nothing.")
    ] = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Set a feature's level, for the whole cluster. Every broker must support it."""
    with RawClient(bootstrap) as client:
        now = next((each["level"] for each in _described(client) if each["name"] == name), None)
        update = FeatureUpdateKey(
            feature=name,
            max_version_level=level,
            upgrade_type=SAFE_DOWNGRADE if now is not None and level < now else UPGRADE,
        )
        answer = client.ask(UpdateFeaturesRequest(feature_updates=[update], validate_only=dry_run))
    what = f"could not set {name} to {level}"
    refuse(answer.error_code, answer.error_message, what)
    for result in answer.results:
        refuse(result.error_code, result.error_message, what)
    if as_json:
        show_json({"feature": name, "from": now, "to": level, "dry_run": dry_run})
        return
    before = "" if now is None or now == level else f", now {now}" if dry_run else f", before {now}"
    print(f"{'could set' if dry_run else 'set'} {name} to {level}{before}")


def _described(client: RawClient) -> list[dict[str, Any]]:
    """Every feature that the broker supports or the cluster uses, by name; None for no range or no level."""
    answer = client.ask(
        ApiVersionsRequest(client_software_name="penstock-cli", client_software_version=__version__)
    )
    refuse(answer.error_code, None, "could not list the features")
    ranges = {each.name: (each.min_version, each.max_version) for each in answer.supported_features}
    levels = {each.name: each.max_version_level for each in answer.finalized_features}
    described = []
    for name in sorted(ranges.keys() | levels.keys()):
        low, high = ranges.get(name, (None, None))
        described.append({"name": name, "min": low, "max": high, "level": levels.get(name)})
    return described


def _range_text(low: int | None, high: int | None) -> str | None:
    return None if low is None else str(low) if low == high else f"{low}-{high}"
