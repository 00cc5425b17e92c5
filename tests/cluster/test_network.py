"""The network that the cluster tests cut: whoever is cut off is met with silence, not with an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.network import OUTSIDE, Network

NOBODY_LISTENS, SILENCE = "refused", "silence"
DISCARD_PORT = 9
CONNECT = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], {DISCARD_PORT}), 0.5)
except ConnectionRefusedError:
    print("{NOBODY_LISTENS}")
except TimeoutError:
    print("{SILENCE}")
"""


def knock(network: Network, sender: int, receiver: int) -> str:
    """What one hears that knocks at another's door, where nobody listens."""
    before = network.inside(sender) if sender != OUTSIDE else []
    command = [*before, sys.executable, "-c", CONNECT, network.host(receiver)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def three(network: Network) -> Network:
    for node in (1, 2, 3):
        network.add(node)
    return network


def test_nodes_and_clients_reach_each_other(three: Network) -> None:
    pairs = [(1, 2), (2, 3), (3, 1), (OUTSIDE, 1), (2, OUTSIDE)]
    assert {knock(three, *pair) for pair in pairs} == {NOBODY_LISTENS}


def test_a_cut_between_two_is_silent_and_leaves_the_others_alone(three: Network) -> None:
    three.cut(1, 2)
    assert knock(three, 1, 2) == knock(three, 2, 1) == SILENCE
    assert knock(three, 1, 3) == knock(three, OUTSIDE, 1) == knock(three, OUTSIDE, 2) == NOBODY_LISTENS


def test_a_node_that_is_cut_off_is_reached_by_nobody_until_it_is_healed(three: Network) -> None:
    three.cut_off(1)
    assert {knock(three, *pair) for pair in [(1, 2), (3, 1), (OUTSIDE, 1), (1, OUTSIDE)]} == {SILENCE}
    three.heal()
    assert {knock(three, *pair) for pair in [(1, 2), (3, 1), (OUTSIDE, 1)]} == {NOBODY_LISTENS}


def test_a_node_cut_off_from_the_others_still_hears_clients(three: Network) -> None:
    three.cut_off(1, also_from_clients=False)
    assert knock(three, 1, 2) == knock(three, 3, 1) == SILENCE
    assert knock(three, OUTSIDE, 1) == NOBODY_LISTENS


def test_one_way_is_cut_alone(three: Network) -> None:
    """A datagram, because a connection needs both ways."""
    three.mute(1, 2)
    assert datagrams_arrive(three, 2, 1)
    assert not datagrams_arrive(three, 1, 2)


def datagrams_arrive(network: Network, sender: int, receiver: int) -> bool:
    listen = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(5); s.bind(('', 4567));"
        " print('listening', flush=True); print(s.recv(9).decode())"
    )
    send = (
        "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM);"
        " s.sendto(b'hello', (sys.argv[1], 4567))"
    )
    with subprocess.Popen(
        [*network.inside(receiver), sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "listening\n"
        subprocess.run(
            [*network.inside(sender), sys.executable, "-c", send, network.host(receiver)], check=True
        )
        try:
            listener.wait(1)
        except subprocess.TimeoutExpired:
            listener.kill()
            return False
        return listener.stdout.read() == "hello\n"
