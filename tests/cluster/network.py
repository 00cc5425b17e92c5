"""A network of their own for the nodes of a cluster: each in a namespace, all on one bridge, cut at will.

A cut is silent, as a pulled cable is: whoever sends is told a hardware address that nobody has, so packets leave
and never arrive, no connection is refused or closed, and a one-way cut is one such lie. What a newcomer gets
wrong: taking the link down or adding a blackhole route looks like the same thing but gives the sender errors
(no route to host, invalid argument), which tell it at once what a real cut does not.

It needs root and the ``ip`` command; ``why_not`` says what is missing.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
from types import TracebackType

# Set aside for trying out networks (RFC 2544), so no host has an address there.
PREFIX = "198.18"
# Whoever is not a node: the clients, on the host's side of the bridge.
OUTSIDE = 0
_OUTSIDE_HOST = 1
_NODE_HOST = 10
_NOBODY = "02:00:5e:00:00:01"
_NAMESPACE = re.compile(r"^penstock-([0-9a-f]+)[g-z]-", re.MULTILINE)
_DEVICE = re.compile(r"\b(ps[bv]([0-9a-f]+)[g-z](?:-\d+)?)\b")
# Not hexadecimal, so that the number before ends there.
_letters = itertools.cycle("ghijklmnopqrstuvwxyz")


def why_not() -> str | None:
    """What keeps this machine from having such a network; None where it can be had."""
    if shutil.which("ip") is None:
        return "cutting a node off needs the ip command (iproute2)"
    if os.geteuid() != 0:
        return "cutting a node off needs root, for network namespaces"
    with Network() as trial:
        try:
            trial.build()
            trial.add(1)
        except subprocess.CalledProcessError as error:
            return f"network namespaces cannot be had here: {error.stderr.strip()}"
    return None


class Network:
    """Built on entering the context; its namespaces and devices are gone on leaving it."""

    def __init__(self) -> None:
        # Named after this process, so that another can tell when nobody needs it any more.
        self._tag = f"{os.getpid():x}{next(_letters)}"
        self._subnet = f"{PREFIX}.{random.SystemRandom().randrange(1, 255)}"
        self._bridge = f"psb{self._tag}"
        self._nodes: list[int] = []
        # Pairs (who sends, who does not receive it).
        self._cuts: set[tuple[int, int]] = set()
        self._is_built = False

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def build(self) -> None:
        _remove_abandoned()
        _ip("link", "add", self._bridge, "type", "bridge")
        self._is_built = True
        _ip("address", "add", f"{self.host(OUTSIDE)}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def close(self) -> None:
        for node in self._nodes:
            # Its end of the cable goes with it.
            _ip("netns", "delete", self._namespace(node), check=False)
            _ip("link", "delete", self._cable(node), check=False)
        if self._is_built:
            _ip("link", "delete", self._bridge, check=False)
        self._nodes, self._is_built = [], False

    def add(self, node: int) -> str:
        """Give a node a namespace; the address it has there."""
        if not self._is_built:
            self.build()
        namespace, cable = self._namespace(node), self._cable(node)
        self._nodes.append(node)
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", namespace, "address", "add", f"{self.host(node)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        return self.host(node)

    def host(self, node: int) -> str:
        return f"{self._subnet}.{_OUTSIDE_HOST if node == OUTSIDE else _NODE_HOST + node}"

    def inside(self, node: int) -> list[str]:
        """What to put before a command to run it where the node runs. It becomes that command: one process."""
        return ["ip", "netns", "exec", self._namespace(node)]

    # Faults

    def cut(self, one: int, other: int) -> None:
        """Nothing passes between two of them."""
        self.mute(one, other)
        self.mute(other, one)

    def mute(self, sender: int, receiver: int) -> None:
        """What one sends does not reach the other; what the other sends still arrives."""
        if (sender, receiver) not in self._cuts:
            self._neighbour("replace", sender, receiver, "lladdr", _NOBODY, "nud", "permanent")
            self._cuts.add((sender, receiver))

    def cut_off(self, node: int, *, also_from_clients: bool = True) -> None:
        """Nothing passes between a node and the others."""
        for other in self._parties(also_from_clients):
            if other != node:
                self.cut(node, other)

    def heal(self) -> None:
        for sender, receiver in sorted(self._cuts):
            self._neighbour("delete", sender, receiver)
        self._cuts.clear()

    def _neighbour(self, verb: str, sender: int, receiver: int, *more: str) -> None:
        where = (
            ("neighbour", verb, self.host(receiver), "dev", self._bridge, *more)
            if sender == OUTSIDE
            else ("-n", self._namespace(sender), "neighbour", verb, self.host(receiver), "dev", "eth0", *more)
        )
        _ip(*where)

    def _parties(self, also_clients: bool) -> list[int]:
        return [*([OUTSIDE] if also_clients else []), *self._nodes]

    def _namespace(self, node: int) -> str:
        return f"penstock-{self._tag}-{node}"

    def _cable(self, node: int) -> str:
        return f"psv{self._tag}-{node}"


def _remove_abandoned() -> None:
    """Remove what a process left behind that was killed before it could."""
    for line in _ip("netns", "list").splitlines():
        found = _NAMESPACE.match(line)
        if found and not os.path.exists(f"/proc/{int(found[1], 16)}"):
            _ip("netns", "delete", line.split()[0], check=False)
    for device, owner in _DEVICE.findall(_ip("-oneline", "link")):
        if not os.path.exists(f"/proc/{int(owner, 16)}"):
            _ip("link", "delete", device, check=False)


def _ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout
