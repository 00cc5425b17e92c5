"""A right that was taken away is gone at once: for open connections, sessions, and requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.network.authorization import Operation, ResourceType
from penstock.metadata.authorizer import ALLOW, DENY, LITERAL, PREFIXED
from penstock.metadata.security import Acl
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.fetch import FetchRequest
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.transactions import AddOffsetsToTxnRequest
from tests.broker.rights.rows import fetch_request
from tests.broker.rights.scene import HOST, Scene, errors_in, produce_request

READ, WRITE = Operation.READ, Operation.WRITE
TOPIC = ResourceType.TOPIC
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.create("t")
    return scene


def test_an_open_connection_cannot_write_after_the_right_is_gone(scene: Scene) -> None:
    ids = scene.allow("alice", (WRITE, TOPIC, "t"))
    client = scene.client("alice")
    assert not list(errors_in(client.call(produce_request("t"), 9)))
    scene.remove(ids)
    assert set(errors_in(client.call(produce_request("t"), 9))) == {DENIED}
    scene.allow("alice", (WRITE, TOPIC, "t"))
    assert not list(errors_in(client.call(produce_request("t"), 9)))


def test_without_acknowledgement_a_denied_write_closes_the_connection(scene: Scene) -> None:
    client = scene.client("alice")
    before = scene.state()
    client.send(produce_request("t", acks=0), 9, expects_answer=False)
    scene.world.run_until(lambda: client.is_closed, 1_000)
    assert scene.state() == before


def test_a_deny_wins_over_what_prefixes_and_everybody_are_allowed(scene: Scene) -> None:
    scene.add(Acl(TOPIC, "t", PREFIXED, "User:*", "*", WRITE, ALLOW))
    client, elsewhere = scene.client("alice"), scene.client("alice", "10.9.9.9")
    assert not list(errors_in(client.call(produce_request("t"), 9)))
    scene.add(Acl(TOPIC, "*", LITERAL, "User:alice", HOST, WRITE, DENY))
    assert set(errors_in(client.call(produce_request("t"), 9))) == {DENIED}
    assert not list(errors_in(elsewhere.call(produce_request("t"), 9))), "denied on one host only"


def test_a_waiting_fetch_is_checked_again_when_it_is_answered(scene: Scene) -> None:
    ids = scene.allow("alice", (READ, TOPIC, "t"))
    client = scene.client("alice")
    client.send(fetch_request(max_wait_ms=5_000, min_bytes=1), 12)
    scene.world.run_for(100)
    assert client.answers == [], "there is nothing to read yet"
    scene.remove(ids)
    scene.admin.call(produce_request("t"), 9)
    scene.world.run_until(lambda: bool(client.answers), 5_000)
    (partition,) = client.answers[0].responses[0].partitions
    assert partition.error_code == DENIED
    assert not partition.records


def test_a_fetch_session_does_not_remember_that_it_was_allowed(scene: Scene) -> None:
    ids = scene.allow("alice", (READ, TOPIC, "t"))
    client = scene.client("alice")
    scene.admin.call(produce_request("t"), 9)
    first = client.call(fetch_request(session_epoch=0), 12)
    assert first.session_id
    assert first.responses[0].partitions[0].records
    scene.remove(ids)

    def ask_on(epoch: int) -> Any:
        return client.call(FetchRequest(session_id=first.session_id, session_epoch=epoch), 12)

    (partition,) = ask_on(1).responses[0].partitions
    assert partition.error_code == DENIED
    assert not partition.records
    scene.allow("alice", (READ, TOPIC, "t"))
    (partition,) = ask_on(2).responses[0].partitions
    assert partition.records, "the session has the partition still"


def test_a_batch_that_waits_for_its_transaction_is_checked_again(scene: Scene) -> None:
    ids = scene.allow("alice", (WRITE, TOPIC, "t"), (WRITE, ResourceType.TRANSACTIONAL_ID, "x"))
    producer_id, epoch = scene.producer("x")
    request = produce_request(
        "t",
        transactional_id="x",
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        transactional=True,
    )
    asked: list[Callable[[], None]] = []
    client_of_coordinators: Any = scene.broker.verification._client
    ask = client_of_coordinators.ask
    client_of_coordinators.ask = lambda question, done: asked.append(lambda: ask(question, done))
    client = scene.client("alice")
    client.send(request, 12)
    scene.world.run_until(lambda: bool(asked), 1_000)
    scene.remove(ids[:1])
    before = scene.broker.partitions.get("t", 0)
    assert before is not None
    end_offset = before.log.log_end_offset
    asked[0]()
    scene.world.run_until(lambda: bool(client.answers), 5_000)
    assert set(errors_in(client.answers[0])) == {DENIED}
    assert before.log.log_end_offset == end_offset
    scene.broker.verification.check()


@pytest.mark.parametrize(
    ("lost", "error"),
    [(0, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), (1, ErrorCode.GROUP_AUTHORIZATION_FAILED)],
)
def test_offsets_that_wait_for_their_topic_are_checked_again(
    scene: Scene, lost: int, error: ErrorCode
) -> None:
    ids = scene.allow("alice", (WRITE, ResourceType.TRANSACTIONAL_ID, "x"), (READ, ResourceType.GROUP, "g"))
    producer_id, epoch = scene.producer("x")
    scene.commit("g", "t")
    waiting: list[Callable[[], None]] = []
    coordinators: Any = scene.broker.group_coordinators
    wait = coordinators.when_topic_exists
    coordinators.when_topic_exists = lambda then: waiting.append(lambda: wait(then))
    client = scene.client("alice")
    request = AddOffsetsToTxnRequest(
        transactional_id="x", producer_id=producer_id, producer_epoch=epoch, group_id="g"
    )
    client.send(request, 3)
    scene.world.run_until(lambda: bool(waiting), 1_000)
    scene.remove([ids[lost]])
    before = scene.state()
    waiting[0]()
    scene.world.run_until(lambda: bool(client.answers), 5_000)
    assert client.answers[0].error_code == error
    assert scene.state() == before


def test_a_transactional_batch_needs_a_right_whatever_the_header_says(scene: Scene) -> None:
    """CVE-2018-17196: what counts is the batch."""
    scene.allow("alice", (WRITE, TOPIC, "t"))
    producer_id, epoch = scene.producer("x")
    fields = {"producer_id": producer_id, "producer_epoch": epoch, "base_sequence": 0, "transactional": True}
    client = scene.client("alice")
    before = scene.state()
    for transactional_id in (None, "x", "other"):
        answer = client.call(produce_request("t", transactional_id=transactional_id, **fields), 12)
        assert set(errors_in(answer)) == {ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    assert scene.state() == before


def test_a_new_snapshot_of_the_metadata_takes_rights_away_too(scene: Scene) -> None:
    """A broker that was away gets one image instead of the changes."""
    scene.allow("alice", (WRITE, TOPIC, "t"))
    client = scene.client("alice")
    assert not list(errors_in(client.call(produce_request("t"), 9)))
    assert scene.broker.authorizer is not None
    scene.broker.authorizer.follow({})
    assert set(errors_in(client.call(produce_request("t"), 9))) == {DENIED}


def test_long_names_are_not_remembered(scene: Scene) -> None:
    """A client without any right could fill the memory with them."""
    scene.allow("alice", (Operation.DESCRIBE, ResourceType.GROUP, "g" * 900))
    client = scene.client("alice")
    keys = [f"{number}-".ljust(20_000, "x") for number in range(50)] + ["g" * 900]
    answer = client.call(FindCoordinatorRequest(coordinator_keys=keys), 4)
    errors = [each.error_code for each in answer.coordinators]
    assert errors == [ErrorCode.GROUP_AUTHORIZATION_FAILED] * 50 + [ErrorCode.NONE]
    assert scene.world.node.client is not None
    *_, connection = scene.world.node.client._connections
    kept = [name for names in connection.decisions.values() for name in names]
    assert sum(map(len, kept)) < 10_000
