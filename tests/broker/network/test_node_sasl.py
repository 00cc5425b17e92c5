"""The exchange between nodes, without a connection: each message once, in order, and unchanged."""

from __future__ import annotations

import struct

import pytest

from penstock.broker.network.node_sasl import NodeSaslClient, NodeSaslServer, NotAdmitted
from penstock.broker.network.node_secret import MECHANISM
from penstock.sasl.scram import Keys, keys, nonce_from, salted_password

SECRET, OLD = "s3cret-of-the-whole-cluster", "the-s3cret-that-it-had-before"
SALT = b"salt-of-the-node-that-accepts"
NONCE, OTHER_NONCE = nonce_from(bytes(range(24))), nonce_from(bytes(range(1, 25)))


def known(secret: str) -> Keys:
    return keys(MECHANISM, salted_password(MECHANISM, secret, SALT, 4096), SALT, 4096)


KEYS, OLD_KEYS = known(SECRET), known(OLD)


def body(frame: bytes) -> memoryview:
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    return memoryview(frame)[4:]


def talk(client: NodeSaslClient, server: NodeSaslServer, secret: str) -> list[bytes]:
    """All frames, those of the client at even places. Raises NotAdmitted."""
    frames = [client.start()]
    while not client.is_done:
        frames.append(server.received(body(frames[-1])))
        server.check()
        answer = client.received(body(frames[-1]))
        if not answer and client.is_done:
            break
        if not answer:
            assert client.challenge is not None
            answer = client.answer(salted_password(MECHANISM, secret, *client.challenge))
        frames.append(answer)
    return frames


@pytest.mark.parametrize("secret", [SECRET, OLD])
def test_both_sides_prove_either_secret(secret: str) -> None:
    client, server = NodeSaslClient(secret, NONCE), NodeSaslServer([KEYS, OLD_KEYS], OTHER_NONCE)
    frames = talk(client, server, secret)
    assert server.is_admitted and client.is_done and len(frames) == 6
    assert not any(secret.encode() in frame for frame in frames)


def test_a_wrong_secret_is_not_admitted() -> None:
    client, server = NodeSaslClient(OLD, NONCE), NodeSaslServer([KEYS], OTHER_NONCE)
    with pytest.raises(NotAdmitted, match="invalid credentials") as refused:
        talk(client, server, OLD)
    server.check()
    assert not server.is_admitted and refused.value.told
    with pytest.raises(NotAdmitted, match="do both have the same secret"):
        client.received(body(refused.value.told))


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    client = NodeSaslClient(SECRET, NONCE)
    frames = talk(client, NodeSaslServer([KEYS], OTHER_NONCE), SECRET)
    again = NodeSaslClient(SECRET, NONCE)
    again.start()
    again.received(body(frames[1]))
    again.received(body(frames[3]))
    assert again.challenge is not None
    again.answer(salted_password(MECHANISM, SECRET, *again.challenge))
    forged = bytearray(frames[5])
    forged[-10] ^= 1
    with pytest.raises(NotAdmitted):
        again.received(body(bytes(forged)))
    assert not again.is_done


def test_a_recorded_exchange_cannot_be_repeated() -> None:
    frames = talk(NodeSaslClient(SECRET, NONCE), NodeSaslServer([KEYS], OTHER_NONCE), SECRET)
    server = NodeSaslServer([KEYS], nonce_from(bytes(24)))
    server.received(body(frames[0]))
    server.received(body(frames[2]))
    with pytest.raises(NotAdmitted, match="nonce"):
        server.received(body(frames[4]))
    assert not server.is_admitted


def test_messages_in_another_order_end_the_exchange() -> None:
    frames = talk(NodeSaslClient(SECRET, NONCE), NodeSaslServer([KEYS], OTHER_NONCE), SECRET)
    client_frames = frames[::2]
    for order in ([1], [2], [0, 0], [0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2, 2], [0, 1, 2, 0]):
        server = NodeSaslServer([KEYS], OTHER_NONCE)
        for place in order[:-1]:
            server.received(body(client_frames[place]))
        with pytest.raises(NotAdmitted):
            server.received(body(client_frames[order[-1]]))
        # And nothing helps any more.
        for frame in client_frames:
            with pytest.raises(NotAdmitted):
                server.received(body(frame))


def test_every_changed_byte_of_a_proof_is_noticed() -> None:
    frames = talk(NodeSaslClient(SECRET, NONCE), NodeSaslServer([KEYS], OTHER_NONCE), SECRET)
    for place in range(4, len(frames[4])):
        # Neither the correlation id nor the client id is part of the proof.
        if place in range(8, 12) or place in range(14, 22):
            continue
        changed = bytearray(frames[4])
        changed[place] ^= 0x20
        server = NodeSaslServer([KEYS], OTHER_NONCE)
        server.received(body(frames[0]))
        server.received(body(frames[2]))
        with pytest.raises(NotAdmitted):
            server.received(memoryview(bytes(changed))[4:])
        assert not server.is_admitted, place
