"""`penstock serve`: one node in the foreground.

This module only reads options and refuses bad ones; the broker does the rest. It is on the way to every
start, so it parses with argparse instead of Typer (a tenth of a second of CPU less) and imports the broker
only once the options are known to be good.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from penstock.broker.options import ServeError, ServeOptions
from penstock.cli.addresses import format_address, is_loopback, is_unspecified, parse_address
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.settings import parse_settings

SUMMARY = "Run one broker in the foreground."
DESCRIPTION = """\
Run one broker in the foreground until SIGTERM or Ctrl-C. Without options it is a whole one-node cluster on
127.0.0.1:9092. When ready it prints one line that begins `penstock node 1 ready` and says its address."""

DATA_DIR = "penstock-data"
LISTEN = "127.0.0.1:9092"
NODE_ID_MAX = 2**31 - 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message}; see `penstock serve --help`")


def _parser() -> _Parser:
    parser = _Parser(prog="penstock serve", description=DESCRIPTION, allow_abbrev=False)
    option = parser.add_argument
    option("--node-id", type=int, default=1, metavar="N", help="this broker's number (default 1)")
    option("--data-dir", action="append", metavar="DIR", help=f"where the logs are kept (default {DATA_DIR})")
    option(
        "--listen",
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"where clients connect; port 0 picks a free one (default {LISTEN})",
    )
    option("--advertise", metavar="HOST:PORT", help="the address clients are told, if it is another")
    option("--internal", metavar="HOST:PORT", help="for a cluster of several nodes; not supported yet")
    option(
        "--controllers", metavar="ID@HOST:PORT,...", help="for a cluster of several nodes; not supported yet"
    )
    option("--http", default="off", metavar="off", help="the HTTP gateway; only `off` for now")
    option("--rack", metavar="R", help="where this broker stands, for clients that prefer a near one")
    option(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a broker setting by Kafka's name, such as log.retention.hours=24; repeatable",
    )
    option("--config", metavar="FILE.toml", help="settings from a file; --set wins over it")
    option("--insecure", action="store_true", help="let other machines connect, without authentication")
    return parser


def serve(words: list[str]) -> int:
    """Parse the words after `penstock serve`, then serve until told to stop."""
    try:
        given = _parser().parse_args(words)
    except SystemExit as leaving:  # --help has been printed
        return int(leaving.code or 0)
    options = _options(given)
    _check_reach(options, insecure=given.insecure)
    _check_platform()
    from penstock.broker import server  # noqa: PLC0415  # a refused start should not pay for the broker

    try:
        return server.run(options)
    except ServeError as error:
        raise Failure(str(error)) from None


def _options(given: argparse.Namespace) -> ServeOptions:
    if given.controllers is not None:
        raise WrongUsage("a cluster of several nodes is not supported yet; leave --controllers out")
    if given.internal is not None:
        raise WrongUsage("a cluster of several nodes is not supported yet; leave --internal out")
    if given.http != "off":
        raise WrongUsage("the HTTP gateway is not there yet; leave --http out, or say --http off")
    if not 0 <= given.node_id <= NODE_ID_MAX:
        raise WrongUsage(f"--node-id is a number from 0 to {NODE_ID_MAX}; got {given.node_id}")
    data_dirs = tuple(given.data_dir or (DATA_DIR,))
    if len(data_dirs) > 1:
        raise WrongUsage("several data directories are not supported yet; name one --data-dir")
    return ServeOptions(
        node_id=given.node_id,
        data_dirs=data_dirs,
        listen=_address("--listen", given.listen),
        advertise=None if given.advertise is None else _address("--advertise", given.advertise),
        rack=given.rack,
        settings=parse_settings("--set", given.settings),
        config_file=given.config,
    )


def _check_platform() -> None:
    if not __debug__:
        raise Failure("python -O is refused: assertions guard the broker's invariants; start it without -O")
    if sys.platform == "win32":
        raise Failure("Penstock serves on Linux and macOS; on Windows run it inside WSL")


def _address(option: str, text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from None


def _check_reach(options: ServeOptions, *, insecure: bool) -> None:
    """Refuse to be open to other machines by accident, or to tell clients an address that leads nowhere."""
    host, port = options.listen
    try:
        private = is_loopback(host)
    except ValueError as error:
        raise WrongUsage(f"--listen: {error}") from None
    if not private and not insecure:
        raise WrongUsage(
            f"{format_address(host, port)} is open to other machines and there is no authentication yet; "
            "listen on 127.0.0.1, or pass --insecure if the network is trusted"
        )
    if options.advertise is None:
        if is_unspecified(host):
            raise WrongUsage(
                f"clients cannot connect to {host}; tell them where with --advertise HOST:PORT, "
                "such as this machine's name and port"
            )
    elif options.advertise[1] == 0 or is_unspecified(options.advertise[0]):
        told = format_address(*options.advertise)
        raise WrongUsage(f"--advertise: clients cannot connect to {told}; name a host and a port")
