"""`penstock serve`: one node in the foreground.

This module only parses and checks options; the broker does the rest. Every start pays for it, so it uses argparse
instead of Typer (0.1 s of CPU less) and imports the broker only after the options are checked.

A node is a cluster by itself or one of several. In the second case ``--controllers``, the same on every node, lists
the nodes that vote on the metadata, and ``--internal`` is where this node listens to the other nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from penstock.addresses import format_address, is_loopback, is_unspecified, parse_address
from penstock.broker.options import BROKER, CONTROLLER, ServeError, ServeOptions
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.settings import parse_settings

SUMMARY = "Run one broker in the foreground."
DESCRIPTION = """\
Run one broker in the foreground until SIGTERM or Ctrl-C. Without options it is a whole one-node cluster on
127.0.0.1:9092. When ready it prints one line that starts with `penstock node 1 ready` and has its address."""

DATA_DIR = "penstock-data"
# In the data directory of `penstock dev`, which holds its nodes' directories. Both commands have the same default.
CLUSTER_FILE = "cluster.json"
LISTEN = "127.0.0.1:9092"
LOOPBACK = "127.0.0.1"
NODE_ID_MAX = 2**31 - 1
# How long a node may take to stop cleanly after its parent has died.
ORPHAN_STOP_S = 30.0
# Of a new cluster: USER:PASSWORD. Not an option, which every user of the machine could read.
ADMIN_VARIABLE = "PENSTOCK_ADMIN"

Address = tuple[str, int]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message}; see `penstock serve --help`")


def _parser() -> _Parser:
    parser = _Parser(prog="penstock serve", description=DESCRIPTION, allow_abbrev=False)
    option = parser.add_argument
    option("--node-id", type=int, default=1, metavar="N", help="this node's id (default 1)")
    option(
        "--data-dir",
        action="append",
        metavar="DIR",
        help=f"where the logs are kept; repeat it for several disks (default {DATA_DIR})",
    )
    option(
        "--listen",
        metavar="HOST:PORT",
        help=f"where clients connect, without TLS; port 0 picks a free one (default {LISTEN})",
    )
    option("--advertise", metavar="HOST:PORT", help="the address for clients, if it differs from --listen")
    option("--internal", metavar="HOST:PORT", help="where the other nodes of the cluster connect")
    option(
        "--controllers",
        metavar="ID@HOST:PORT,...",
        help="the nodes that vote on the metadata, with their --internal addresses; the same on every node",
    )
    option(
        "--roles",
        metavar="ROLES",
        help="broker, controller, or broker,controller (default: broker, and controller if among --controllers)",
    )
    option("--http", default="off", metavar="off", help="the HTTP gateway; only `off` for now")
    option(
        "--metrics",
        default="off",
        metavar="HOST:PORT",
        help="metrics and health over HTTP; only a port means 127.0.0.1, port 0 picks a free one (default off)",
    )
    option("--rack", metavar="R", help="this broker's rack or zone, for placing replicas and reading nearby")
    option(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a broker setting by Kafka's name, such as log.retention.hours=24; repeatable",
    )
    option("--config", metavar="FILE.toml", help="a file of settings; --set wins over it")
    option(
        "--insecure",
        action="store_true",
        help="allow connections from other machines, without authentication",
    )
    # For `penstock dev`: a killed parent cannot stop its children, but its pipes close.
    option("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def serve(words: list[str]) -> int:
    """Parse the words after `penstock serve`, then serve until a signal."""
    try:
        arguments = _parser().parse_args(words)
    except SystemExit as leaving:  # --help has been printed
        return int(leaving.code or 0)
    options = _options(arguments)
    _check_reach(options)
    _check_platform()
    if len(options.controllers) % 2 == 0 and options.controllers:
        _warn_of_even(len(options.controllers))
    if arguments.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, name="stop-with-stdin", daemon=True).start()
    from penstock.broker import process  # noqa: PLC0415  # a refused start should not pay for the broker

    try:
        return process.run(options)
    except ServeError as error:
        raise Failure(str(error)) from None


def _options(arguments: argparse.Namespace) -> ServeOptions:
    if arguments.http != "off":
        raise WrongUsage("there is no HTTP gateway yet; omit --http or use --http off")
    if not 0 <= arguments.node_id <= NODE_ID_MAX:
        raise WrongUsage(f"--node-id is a number from 0 to {NODE_ID_MAX}; got {arguments.node_id}")
    data_dirs = tuple(arguments.data_dir or (DATA_DIR,))
    if len(set(map(os.path.abspath, data_dirs))) < len(data_dirs):
        raise WrongUsage("--data-dir: the same directory is given twice")
    for data_dir in data_dirs:
        if os.path.exists(os.path.join(data_dir, CLUSTER_FILE)):
            raise Failure(
                f"{data_dir} holds a cluster of `penstock dev`; run that, or choose another --data-dir"
            )
    controllers = {} if arguments.controllers is None else _controllers(arguments.controllers)
    roles = _roles(arguments, controllers)
    if BROKER not in roles and (arguments.listen is not None or arguments.advertise is not None):
        raise WrongUsage("a node that is only a controller has no clients; omit --listen and --advertise")
    return ServeOptions(
        node_id=arguments.node_id,
        data_dirs=data_dirs,
        listen=None if arguments.listen is None else _address("--listen", arguments.listen),
        advertise=None if arguments.advertise is None else _address("--advertise", arguments.advertise),
        rack=arguments.rack,
        settings=parse_settings("--set", arguments.settings),
        config_file=arguments.config,
        internal=_internal(arguments, controllers),
        controllers=controllers,
        roles=roles,
        is_insecure=arguments.insecure,
        metrics=_metrics(arguments.metrics),
        # Out of the environment, which the processes that the broker starts would inherit.
        admin=os.environ.pop(ADMIN_VARIABLE, "") or None,
    )


def _controllers(text: str) -> dict[int, Address]:
    """Parse `1@host:port,2@host:port` into addresses by node id."""
    found: dict[int, Address] = {}
    for each in text.split(","):
        node, at, where = each.strip().partition("@")
        if not at or not (node.isascii() and node.isdigit()) or int(node) > NODE_ID_MAX:
            raise WrongUsage(f"--controllers: write ID@HOST:PORT,..., such as 1@127.0.0.1:9094; got {each!r}")
        address = _address("--controllers", where)
        if address[1] == 0 or is_unspecified(address[0]):
            raise WrongUsage(f"--controllers: no node can connect to {where}; give a host and a port")
        if int(node) in found:
            raise WrongUsage(f"--controllers: node {node} is given twice")
        if address in found.values():
            raise WrongUsage(f"--controllers: {where} is given twice")
        found[int(node)] = address
    return found


def _roles(arguments: argparse.Namespace, controllers: dict[int, Address]) -> tuple[str, ...]:
    listed = arguments.node_id in controllers
    if arguments.roles is None:
        return (BROKER, CONTROLLER) if listed or not controllers else (BROKER,)
    named = [role.strip() for role in arguments.roles.split(",")]
    roles = tuple(role for role in (BROKER, CONTROLLER) if role in named)
    if len(roles) != len(named):
        raise WrongUsage(f"--roles: write broker, controller, or broker,controller; got {arguments.roles!r}")
    if not controllers and len(roles) == 1:
        raise WrongUsage(f"a node that is only a {roles[0]} needs a cluster; add --controllers")
    if controllers and CONTROLLER in roles and not listed:
        raise WrongUsage(f"node {arguments.node_id} has the role controller but is not among --controllers")
    if listed and CONTROLLER not in roles:
        raise WrongUsage(
            f"node {arguments.node_id} is among --controllers, so its --roles must include controller"
        )
    return roles


def _internal(arguments: argparse.Namespace, controllers: dict[int, Address]) -> Address | None:
    if arguments.internal is None:
        if controllers:
            raise WrongUsage(
                "--controllers needs --internal HOST:PORT, where the other nodes connect to this one"
            )
        return None
    if not controllers:
        raise WrongUsage(
            "--internal needs --controllers ID@HOST:PORT,..., the nodes that vote on the metadata"
        )
    host, port = internal = _address("--internal", arguments.internal)
    told = controllers.get(arguments.node_id)
    if told is None:
        if is_unspecified(host):
            raise WrongUsage(
                f"--internal: other nodes cannot connect to {host}; give an address of this machine"
            )
    elif port != told[1] or not (
        host == told[0] or is_unspecified(host) or _is_name(host) or _is_name(told[0])
    ):
        raise WrongUsage(
            f"--internal {format_address(host, port)} differs from the address of node {arguments.node_id} in "
            f"--controllers, {format_address(*told)}"
        )
    return internal


def _metrics(text: str) -> Address | None:
    """Other machines must be asked for by an address; a port alone is for this one."""
    if text == "off":
        return None
    return _address("--metrics", f"{LOOPBACK}:{text}" if text.isdigit() else text)


def _is_name(host: str) -> bool:
    """Whether a host is a name, which may resolve to any address."""
    return ":" not in host and not host.replace(".", "").isdigit()


def _check_platform() -> None:
    if not __debug__:
        raise Failure("run Python without -O: assertions guard the broker's invariants")
    if sys.platform == "win32":
        raise Failure("Penstock runs on Linux and macOS; on Windows use WSL")


def _address(option: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from None


def _check_reach(options: ServeOptions) -> None:
    """Refuse an accidental listener for other machines, and advertised addresses that cannot work.

    Listeners in the settings are checked with them, in ``broker/listener_settings.py``.
    """
    insecure = options.is_insecure
    if options.internal is not None:
        # Whether it may be open to other machines depends on the settings: ``broker/internal_settings.py``.
        _check_name("--internal", options.internal)
        if BROKER in options.roles and options.internal == options.listen and options.listen[1] != 0:
            raise WrongUsage("--internal and --listen are the same address; clients and nodes need one each")
    if options.metrics is not None:
        if not _check_name("--metrics", options.metrics) and not insecure:
            raise WrongUsage(
                f"metrics at {format_address(*options.metrics)} can be read by other machines without "
                "authentication; listen on 127.0.0.1, or pass --insecure if the network is trusted"
            )
        if options.metrics[1] and options.metrics in (options.listen, options.internal):
            raise WrongUsage("--metrics needs an address of its own")
    if options.listen is not None:
        _check_open("--listen", options.listen, insecure=insecure)
        if options.advertise is None and is_unspecified(options.listen[0]):
            raise WrongUsage(
                f"clients cannot connect to {options.listen[0]}; add --advertise HOST:PORT, "
                "such as this machine's name and port"
            )
    if options.advertise is not None and (options.advertise[1] == 0 or is_unspecified(options.advertise[0])):
        told = format_address(*options.advertise)
        raise WrongUsage(f"--advertise: clients cannot connect to {told}; give a host and a port")


def _check_name(option: str, address: Address) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return is_loopback(address[0])
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from None


def _check_open(option: str, address: Address, *, insecure: bool) -> None:
    if not _check_name(option, address) and not insecure:
        raise WrongUsage(
            f"{format_address(*address)} is open to other machines without authentication; "
            "listen on 127.0.0.1, or pass --insecure if the network is trusted"
        )


def _warn_of_even(count: int) -> None:
    print(
        f"penstock: {count} controllers tolerate no more failures than {count - 1}; use 1, 3 or 5",
        file=sys.stderr,
    )


def _stop_with_stdin() -> None:
    """Stop as on SIGTERM when standard input is closed."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_STOP_S)
    os.kill(os.getpid(), signal.SIGKILL)
