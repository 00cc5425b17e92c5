"""`penstock tls`: a certificate authority for development, and certificates of nodes and clients.

``certificates.py`` makes them. This module says which settings use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.certificates import (
    CERTIFICATE_FILE,
    DAYS_MAX,
    KEY_FILE,
    ORGANIZATION,
    DevelopmentAuthority,
    Issued,
    check_host,
    check_name,
    default_hosts,
    refuse_existing,
)
from penstock.cli.output import show_json, show_table
from penstock.cli.subcommands import subcommands

app = typer.Typer(
    add_completion=False,
    cls=subcommands("--help"),
    help="Make a certificate authority for development, and certificates of nodes and clients.",
)

NODES_MAX = 1000

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="A name or address by which nodes are reached. Repeatable. Default: this machine.",
    ),
]
Days = Annotated[
    int, typer.Option("--days", min=1, max=DAYS_MAX, metavar="N", help="How long the certificates are valid.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.command()
def init(
    directory: Directory,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", min=0, max=NODES_MAX, metavar="N", help="How many nodes get a certificate: node1, ..."
        ),
    ] = 1,
    host: Hosts = None,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make an authority, and certificates of nodes. No file is overwritten."""
    hosts = _hosts(host)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    refuse_existing(
        directory / each for each in (KEY_FILE, CERTIFICATE_FILE, *(f"{name}.pem" for name in names))
    )
    directory.mkdir(parents=True, exist_ok=True)
    authority = DevelopmentAuthority.create(directory, days)
    issued = [authority.issue_node(name, hosts, days) for name in names]
    _show(authority, issued, as_json=as_json, is_new=True)


@app.command()
def node(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NAME", callback=check_name)],
    host: Hosts = None,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make a certificate of one more node, with the authority of `init`."""
    authority = DevelopmentAuthority.load(directory)
    _show(authority, [authority.issue_node(name, _hosts(host), days)], as_json=as_json)


@app.command()
def client(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NAME", callback=check_name)],
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make a certificate of a client, with the authority of `init`."""
    authority = DevelopmentAuthority.load(directory)
    _show(authority, [authority.issue_client(name, days)], as_json=as_json)


def broker_settings(authority: Path, node: Path) -> dict[str, str]:
    """Of a broker with a listener named SSL, by Kafka's names."""
    return {"ssl.keystore.location": str(node), "ssl.truststore.location": str(authority)}


def client_settings(authority: Path, client: Path | None) -> dict[str, str]:
    """Of librdkafka and of our commands. The same file has the certificate and the key."""
    settings = {"security.protocol": "ssl", "ssl.ca.location": str(authority)}
    if client is not None:
        settings |= {"ssl.certificate.location": str(client), "ssl.key.location": str(client)}
    return settings


def java_settings(authority: Path, client: Path | None) -> dict[str, str]:
    settings = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority),
    }
    if client is not None:
        settings |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(client)}
    return settings


def _hosts(given: list[str] | None) -> list[str]:
    return list(dict.fromkeys(map(check_host, given))) if given else default_hosts()


def _show(
    authority: DevelopmentAuthority, issued: list[Issued], *, as_json: bool, is_new: bool = False
) -> None:
    # Brokers and clients run elsewhere than this command.
    trusted = authority.certificate_file.absolute()
    of_client = next((each.file.absolute() for each in issued if each.hosts is None), None)
    of_node = next((each.file.absolute() for each in issued if each.hosts is not None), None)
    broker = {} if of_node is None else broker_settings(trusted, of_node)
    client, java = client_settings(trusted, of_client), java_settings(trusted, of_client)
    if as_json:
        document: dict[str, Any] = {
            "authority": {
                "certificate": str(trusted),
                "key": str(authority.key_file.absolute()),
                "expires": _time(authority.not_after),
            },
            "certificates": [
                {
                    "name": each.name,
                    "kind": "client" if each.hosts is None else "node",
                    "principal": _principal(each),
                    "file": str(each.file.absolute()),
                    "hosts": list(each.hosts or ()),
                    "expires": _time(each.not_after),
                }
                for each in issued
            ],
            "broker_settings": broker,
            "client_settings": client,
            "java_settings": java,
        }
        show_json(document)
        return
    rows = [
        (str(each.file), ", ".join(each.hosts or [_principal(each)]), _time(each.not_after))
        for each in issued
    ]
    if is_new:
        rows.insert(0, (str(authority.certificate_file), "authority", _time(authority.not_after)))
        rows.append((str(authority.key_file), "key of the authority; brokers and clients do not need it", ""))
    show_table(("FILE", "FOR", "EXPIRES"), rows)
    if broker:
        # A JSON string is a TOML string.
        listener = {"listeners": '["SSL://127.0.0.1:9093"]'} | {
            name: json.dumps(value, ensure_ascii=False) for name, value in broker.items()
        }
        _lines(
            "A broker, in the file of `penstock serve --config` (each node has its own .pem):", listener, '"'
        )
    _lines("Clients with librdkafka, and the file of `penstock topics list --config`:", client)
    _lines("Java's clients:", java)


def _lines(title: str, settings: Mapping[str, str], quote: str = "") -> None:
    print(f"\n{title}")
    for name, value in settings.items():
        print(f"  {quote}{name}{quote} = {value}" if quote else f"  {name}={value}")


def _principal(issued: Issued) -> str:
    """As brokers call it without ssl.principal.mapping.rules."""
    return f"User:CN={issued.name},O={ORGANIZATION}"


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
