"""`penstock quotas`: how much clients may use of each broker (KIP-13, KIP-546).

A quota is of a user, of a client id, of both together, or of an address. `<default>` as a name means every one that
has no quota of its own. The names of the quotas and their units are Kafka's.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json
from penstock.cli.output import show_json, show_table
from penstock.cli.raw import RawClient, reason, refuse
from penstock.cli.settings import parse_settings
from penstock.cli.subcommands import subcommands
from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.messages.quotas import (
    MATCH_DEFAULT,
    MATCH_EXACT,
    AlterClientQuotasRequest,
    DescribeClientQuotasRequest,
    QuotaAlteration,
    QuotaFilterComponent,
    QuotaOp,
)

app = typer.Typer(
    add_completion=False,
    cls=subcommands("list"),
    help="Show and change how much clients may use of each broker. Default command: list.",
)

# Kafka's tools write it so. On the wire it is a name that is null.
DEFAULT = "<default>"
EXAMPLE = "producer_byte_rate=1048576"

User = Annotated[str | None, typer.Option("--user", metavar="NAME", help=f"A user, or '{DEFAULT}'.")]
ClientId = Annotated[
    str | None, typer.Option("--client-id", metavar="NAME", help=f"A client id, or '{DEFAULT}'.")
]
Ip = Annotated[str | None, typer.Option("--ip", metavar="ADDRESS", help=f"An address, or '{DEFAULT}'.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say whether it could be done, change nothing.")]


@app.command("list")
def show(
    user: User = None,
    client_id: ClientId = None,
    ip: Ip = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """List quotas: all, or those whose entity has this user, client id or address."""
    with RawClient(bootstrap) as client:
        found = _described(client, _entity(user, client_id, ip, needed=False), strict=False)
    if as_json:
        show_json(found)
        return
    show_table(
        ("USER", "CLIENT ID", "IP", "QUOTA", "VALUE"),
        [
            (
                entry["entity"].get("user", ""),
                entry["entity"].get("client-id", ""),
                entry["entity"].get("ip", ""),
                key,
                _number_text(value),
            )
            for entry in found
            for key, value in entry["quotas"].items()
        ],
    )


@app.command("set")
def set_values(
    pairs: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="Such as producer_byte_rate=1048576.")
    ],
    user: User = None,
    client_id: ClientId = None,
    ip: Ip = None,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Set quotas of a user, a client id, both together, or an address. Other quotas do not change."""
    entity = _entity(user, client_id, ip, needed=True)
    values = {key: _number(key, text) for key, text in parse_settings("quotas set", pairs, EXAMPLE).items()}
    ops = [QuotaOp(key=key, value=value) for key, value in values.items()]
    with RawClient(bootstrap) as client:
        _alter(client, entity, ops, dry_run)
    if as_json:
        show_json({"entity": entity, "set": values, "dry_run": dry_run})
    else:
        listed = ", ".join(f"{key}={_number_text(value)}" for key, value in values.items())
        print(f"{'could set' if dry_run else 'set'} {listed} for {_entity_text(entity)}")


@app.command()
def remove(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="The quotas to remove. Default: all of them."),
    ] = None,
    user: User = None,
    client_id: ClientId = None,
    ip: Ip = None,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove quotas of a user, a client id, both together, or an address."""
    entity = _entity(user, client_id, ip, needed=True)
    with RawClient(bootstrap) as client:
        before: dict[str, float] = next(
            (entry["quotas"] for entry in _described(client, entity, strict=True)), {}
        )
        removed = list(dict.fromkeys(keys)) if keys else list(before)
        missing = [key for key in removed if key not in before]
        if missing or not removed:
            what = f"has no {', '.join(missing)}" if missing else "has no quotas"
            raise Failure(f"{_entity_text(entity)} {what}; see `penstock quotas list`")
        _alter(client, entity, [QuotaOp(key=key, remove=True) for key in removed], dry_run)
    if as_json:
        show_json({"entity": entity, "removed": removed, "dry_run": dry_run})
    else:
        done = "could remove" if dry_run else "removed"
        print(f"{done} {', '.join(removed)} of {_entity_text(entity)}")


def _entity(user: str | None, client_id: str | None, ip: str | None, *, needed: bool) -> dict[str, str]:
    named = {"user": user, "client-id": client_id, "ip": ip}
    entity = {type: name for type, name in named.items() if name is not None}
    if "" in entity.values():
        raise WrongUsage(f"a name must not be empty; '{DEFAULT}' is for all that have no quota of their own")
    if ip is not None and len(entity) > 1:
        raise WrongUsage("--ip cannot be combined with --user or --client-id")
    if needed and not entity:
        raise WrongUsage("say whose quotas: --user, --client-id, both, or --ip")
    return entity


def _described(client: RawClient, entity: dict[str, str], *, strict: bool) -> list[dict[str, Any]]:
    components = [
        QuotaFilterComponent(
            entity_type=type,
            match_type=MATCH_DEFAULT if name == DEFAULT else MATCH_EXACT,
            match=None if name == DEFAULT else name,
        )
        for type, name in entity.items()
    ]
    answer = client.ask(DescribeClientQuotasRequest(components=components, strict=strict))
    refuse(answer.error_code, answer.error_message, "could not list the quotas")
    found: list[dict[str, Any]] = [
        {
            "entity": {
                part.entity_type: DEFAULT if part.entity_name is None else part.entity_name
                for part in entry.entity
            },
            "quotas": {value.key: value.value for value in sorted(entry.values, key=lambda each: each.key)},
        }
        for entry in answer.entries or ()
    ]
    return sorted(found, key=lambda entry: sorted(entry["entity"].items()))


def _alter(client: RawClient, entity: dict[str, str], ops: list[QuotaOp], dry_run: bool) -> None:
    parts = [
        QuotaEntityPart(entity_type=type, entity_name=None if name == DEFAULT else name)
        for type, name in entity.items()
    ]
    entry = QuotaAlteration(entity=parts, ops=ops)
    answer = client.ask(AlterClientQuotasRequest(entries=[entry], validate_only=dry_run))
    for result in answer.entries:
        if result.error_code:
            why = reason(result.error_code, result.error_message)
            raise Failure(f"could not change the quotas of {_entity_text(entity)}: {why}")


def _entity_text(entity: dict[str, str]) -> str:
    return " and ".join(f"{type} {name}" for type, name in entity.items())


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WrongUsage(f"{key} is a number, such as {key}=1000; got {text!r}") from None


def _number_text(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
