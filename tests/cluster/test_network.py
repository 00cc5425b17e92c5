"""The network that the cluster tests cut: whoever is cut off is met with silence, not with an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.network import OUTSIDE, Network

DISCARD_PORT = 9
# Silence can be heard only for a while; an answer may take its time.
SILENCE_S = 0.5
ANSWER_S = 30.0
CONNECT = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], {DISCARD_PORT}), float(sys.argv[2]))
except ConnectionRefusedError:
    print("refused")
except TimeoutError:
    print("silence")
"""
LISTEN = """
import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
s.settimeout(float(sys.argv[1]))
s.bind(("", 4567))
print("listening", flush=True)
try:
    print(s.recv(9).decode())
except TimeoutError:
    print("silence")
"""
SEND = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(b"hello", (sys.argv[1], 4567))
"""


def knock(network: Network, sender: int, receiver: int, within_s: float) -> str:
    """What one hears that knocks at another's door, where nobody listens."""
    before = network.inside(sender) if sender != OUTSIDE else []
    command = [*before, sys.executable, "-c", CONNECT, network.host(receiver), str(within_s)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def reaches(network: Network, sender: int, receiver: int) -> bool:
    return knock(network, sender, receiver, ANSWER_S) == "refused"


def is_cut(network: Network, sender: int, receiver: int) -> bool:
    return knock(network, sender, receiver, SILENCE_S) == "silence"


@pytest.fixture
def three(network: Network) -> Network:
    for node in (1, 2, 3):
        network.add(node)
    return network


def test_nodes_and_clients_reach_each_other(three: Network) -> None:
    pairs = [(1, 2), (2, 3), (3, 1), (OUTSIDE, 1), (2, OUTSIDE)]
    assert all(reaches(three, *pair) for pair in pairs)


def test_a_cut_between_two_is_silent_and_leaves_the_others_alone(three: Network) -> None:
    three.cut(1, 2)
    assert is_cut(three, 1, 2) and is_cut(three, 2, 1)
    assert all(reaches(three, *pair) for pair in [(1, 3), (OUTSIDE, 1), (OUTSIDE, 2)])


def test_a_node_that_is_cut_off_is_reached_by_nobody_until_it_is_healed(three: Network) -> None:
    three.cut_off(1)
    assert all(is_cut(three, *pair) for pair in [(1, 2), (3, 1), (OUTSIDE, 1), (1, OUTSIDE)])
    three.heal()
    assert all(reaches(three, *pair) for pair in [(1, 2), (3, 1), (OUTSIDE, 1)])


def test_a_node_cut_off_from_the_others_still_hears_clients(three: Network) -> None:
    three.cut_off(1, also_from_clients=False)
    assert is_cut(three, 1, 2) and is_cut(three, 3, 1)
    assert reaches(three, OUTSIDE, 1)


def test_one_way_is_cut_alone(three: Network) -> None:
    """A datagram, because a connection needs both ways."""
    three.mute(1, 2)
    assert heard(three, 2, 1, ANSWER_S) == "hello\n"
    assert heard(three, 1, 2, 4 * SILENCE_S) == "silence\n"


def heard(network: Network, sender: int, receiver: int, within_s: float) -> str:
    """What one hears that listens while another sends it a datagram."""
    listen = [*network.inside(receiver), sys.executable, "-c", LISTEN, str(within_s)]
    send = [*network.inside(sender), sys.executable, "-c", SEND, network.host(receiver)]
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "listening\n"
        subprocess.run(send, check=True)
        return listener.stdout.read()
