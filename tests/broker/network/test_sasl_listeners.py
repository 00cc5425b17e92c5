"""A broker with a SASL listener in virtual time, and clients that write their own frames."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.network import sasl_connections, token_keys
from penstock.broker.network.audit import FAILED_LOGINS_PER_WINDOW, WINDOW_MS, Audit
from penstock.broker.network.authentication import AUTHENTICATION_TIMEOUT_MS, FAILED_MESSAGE
from penstock.broker.network.node_secret import NodeSecret
from penstock.metadata.authorizer import Operation, ResourceType
from penstock.metadata.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from penstock.metadata.security import ScramMechanism
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.cluster import ApiVersionsRequest
from penstock.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from penstock.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from penstock.protocol.messages.security import (
    AlterUserScramCredentialsRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from penstock.protocol.records import encode_batch
from penstock.protocol.schema import Message
from penstock.sasl import oauthbearer, plain, scram
from penstock.sasl.tokens import KeysError
from tests.sasl.issuer import AUDIENCE, NAME, Issuer
from tests.virtual import Client, Lines, World

LISTENERS = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:9092",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN",
}
SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
HELLO = ApiVersionsRequest(client_software_name="a", client_software_version="1")
SALT = b"0123456789abcdefghijklmnop"


def alter(world: World, request: Message) -> None:
    answers: list[Any] = []
    world.broker.controller.forward(request, 0, answers.append)
    world.run_until(lambda: bool(answers), 60_000)
    assert not any(result.error_code for result in answers[0].results), answers[0].results


def put(world: World, user: str, password: str, mechanism: ScramMechanism = SHA_256) -> None:
    salted = scram.salted_password(mechanism.sasl_name, password, SALT, 4096)
    alter(
        world,
        AlterUserScramCredentialsRequest(
            upsertions=[
                ScramCredentialUpsertion(
                    name=user, mechanism=mechanism, iterations=4096, salt=SALT, salted_password=salted
                )
            ]
        ),
    )


def remove(world: World, user: str, mechanism: ScramMechanism = SHA_256) -> None:
    deletion = ScramCredentialDeletion(name=user, mechanism=mechanism)
    alter(world, AlterUserScramCredentialsRequest(deletions=[deletion]))


@pytest.fixture
def world() -> World:
    made = World(LISTENERS)
    put(made, "alice", "wonder")
    return made


def token(client: Client, message: bytes) -> Any:
    return client.call(SaslAuthenticateRequest(auth_bytes=message), 2)


def choose(client: Client, mechanism: str) -> None:
    answer = client.call(SaslHandshakeRequest(mechanism=mechanism), 1)
    assert (answer.error_code, mechanism in answer.mechanisms) == (0, True)


def log_in(client: Client, user: str, password: str, mechanism: str = "SCRAM-SHA-256") -> Any:
    """Returns the last answer."""
    choose(client, mechanism)
    if mechanism == "PLAIN":
        return token(client, plain.message(user, password))
    exchange = scram.ScramClient(mechanism, user, password, b"client-nonce-of-24-bytes")
    challenge = token(client, exchange.first())
    assert not challenge.error_code, challenge.error_message
    answer = token(client, exchange.reply(challenge.auth_bytes))
    if not answer.error_code:
        exchange.finish(answer.auth_bytes)
    return answer


def is_served(client: Client) -> bool:
    return not client.is_closed and client.call(MetadataRequest(topics=[]), 12).brokers != []


def is_out(world: World, client: Client, within_ms: int = 1_000) -> None:
    world.run_until(lambda: client.is_closed, within_ms)


def principal(world: World) -> str:
    assert world.node.client is not None
    (connection,) = world.node.client._connections
    return str(connection.principal)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_a_client_with_the_right_password_is_served(world: World, mechanism: str) -> None:
    client = world.client()
    assert not client.call(HELLO, 3).error_code
    answer = log_in(client, "alice", "wonder", mechanism)
    assert (answer.error_code, answer.session_lifetime_ms) == (0, 0)
    assert is_served(client)
    assert principal(world) == "User:alice"


def test_plain_accepts_the_password_of_either_credential(world: World) -> None:
    put(world, "alice", "second", SHA_512)
    for password in ("wonder", "second"):
        assert not log_in(world.client(), "alice", password, "PLAIN").error_code
    assert log_in(world.client(), "alice", "wonder", "SCRAM-SHA-512").error_code


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("nobody", "wonder"), ("", "wonder")])
def test_strangers_get_the_same_answer_and_are_closed(
    world: World, mechanism: str, user: str, password: str
) -> None:
    if not user:
        user = "x" * 5_000
    client = world.client()
    began_ms = world.clock.now_ms()
    answer = log_in(client, user, password, mechanism)
    assert (answer.error_code, answer.error_message) == (
        ErrorCode.SASL_AUTHENTICATION_FAILED,
        FAILED_MESSAGE,
    )
    assert world.clock.now_ms() - began_ms >= 100, "after a delay"
    is_out(world, client, 1)


@pytest.fixture
def audit(world: World) -> Lines:
    log = Lines()
    assert world.node.client is not None
    world.node.client.audit = Audit(log, world.clock)
    return log


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_a_failed_login_is_in_the_audit_log(world: World, audit: Lines, mechanism: str) -> None:
    log_in(world.client("10.1.2.3"), "alice", "wrong", mechanism)
    log_in(world.client("10.1.2.3"), "no\nbody", "wonder", mechanism)
    assert [(event, values["user"]) for event, values in audit.lines] == [
        ("authentication failed", "alice"),
        ("authentication failed", "'no\\nbody'"),
    ]
    _, values = audit.lines[0]
    assert (values["host"], values["listener"], values["mechanism"]) == (
        "10.1.2.3",
        "SASL_PLAINTEXT",
        mechanism,
    )
    assert "wrong" not in str(audit.lines)
    assert not log_in(world.client(), "alice", "wonder", mechanism).error_code
    assert len(audit.lines) == 2, "who succeeds is not in it"


def test_a_stranger_that_leaves_before_it_is_answered_is_in_the_audit_log(world: World, audit: Lines) -> None:
    client = world.client()
    choose(client, "SCRAM-SHA-256")
    exchange = scram.ScramClient("SCRAM-SHA-256", "alice", "wrong", b"client-nonce-of-24-bytes")
    proof = exchange.reply(token(client, exchange.first()).auth_bytes)
    client.send(SaslAuthenticateRequest(auth_bytes=proof), 2)
    world.run_for(1)
    client.stream.close()
    world.run_for(1_000)
    assert [event for event, _ in audit.lines] == ["authentication failed"]


def test_failed_logins_do_not_fill_the_audit_log_or_hide_denials(world: World, audit: Lines) -> None:
    for _ in range(FAILED_LOGINS_PER_WINDOW + 5):
        client = world.client()
        client.send(SaslHandshakeRequest(mechanism="GSSAPI"), 1)
        world.run_for(1)
    assert len(audit.lines) == FAILED_LOGINS_PER_WINDOW
    assert world.node.client is not None and world.node.client.audit is not None
    world.node.client.audit.denied("User:alice", "10.1.2.3", 0, Operation.WRITE, ResourceType.TOPIC, "t")
    assert audit.lines[-1][0] == "denied"
    world.run_for(WINDOW_MS)
    log_in(world.client(), "alice", "wrong")
    assert audit.lines[-2] == ("not all failed authentications were logged", {"count": 5})


def challenge(world: World, user: str) -> dict[str, str]:
    """What a stranger is told."""
    client = world.client()
    choose(client, "SCRAM-SHA-256")
    text = token(client, f"n,,n={user},r=abcdefgh".encode()).auth_bytes.decode()
    return dict(part.split("=", 1) for part in text.split(","))


def test_a_name_that_nobody_has_gets_the_same_salt_each_time(world: World) -> None:
    first, second = challenge(world, "nobody"), challenge(world, "nobody")
    assert (first["s"], first["i"]) == (second["s"], second["i"])
    assert first["r"] != second["r"]
    known = challenge(world, "alice")
    assert (len(known["s"]), known["i"]) == (len(first["s"]), first["i"])


def test_who_knows_the_cluster_id_cannot_tell_made_up_salts(world: World, tmp_path: Path) -> None:
    """Every client that was ever let in knows it, so the nodes' secret is in them, where there is one."""
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("s3cret-of-the-whole-cluster")
    security: Any = SimpleNamespace(secret=NodeSecret(str(path), bytes(32)))
    before = [challenge(world, user)["s"] for user in ("nobody", "alice")]
    world.node._security = security
    after = [challenge(world, user)["s"] for user in ("nobody", "alice")]
    assert [salt == old for salt, old in zip(after, before, strict=True)] == [False, True]


def test_a_produce_before_authentication_closes_the_connection(world: World) -> None:
    for request, version in (
        (ProduceRequest(acks=1, timeout_ms=1, topic_data=[]), 9),
        (MetadataRequest(), 1),
    ):
        client = world.client()
        client.send(request, version)
        is_out(world, client, 10)
        assert client.answers == []
        client = world.client()
        choose(client, "PLAIN")
        client.send(request, version)
        is_out(world, client, 10)


def test_a_request_behind_a_password_waits_for_its_check(world: World) -> None:
    """As in Kafka, which reads on when it has answered."""
    client = world.client()
    client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    client.send(SaslAuthenticateRequest(auth_bytes=plain.message("alice", "wonder")), 2)
    client.send(MetadataRequest(topics=[]), 12)
    world.run_until(lambda: len(client.answers) == 3, 1_000)
    assert client.answers[2].brokers
    stranger = world.client()
    stranger.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    stranger.send(SaslAuthenticateRequest(auth_bytes=plain.message("alice", "wrong")), 2)
    stranger.send(MetadataRequest(topics=[]), 12)
    is_out(world, stranger)
    assert len(stranger.answers) == 2


def test_a_frame_above_the_limit_closes_the_connection_unless_it_is_authenticated(world: World) -> None:
    stranger, client = world.client(), world.client()
    log_in(client, "alice", "wonder")
    huge = struct.pack(">i", 600_000)
    stranger.stream.send([huge])
    client.stream.send([huge])
    is_out(world, stranger, 10)
    world.run_for(1_000)
    assert not client.is_closed


def test_a_stranger_that_reads_no_answers_does_not_fill_the_memory(world: World) -> None:
    assert world.node.client is not None
    client = world.client()
    assert client.stream.other is not None
    client.stream.other.window = 0
    for _ in range(5_000):
        client.send(HELLO, 3)
    world.run_for(1_000)
    (connection,) = world.node.client._connections
    assert connection._unsent_bytes < 100_000
    # Once it reads, everything is answered.
    client.stream.other.open_window(None)
    world.run_for(1_000)
    assert len(client.answers) == 5_000


def test_strangers_get_none_of_the_buffers_that_clients_share(world: World) -> None:
    assert world.node.client is not None
    pool, of_strangers = world.node.client.buffers, world.node.client.buffers_of_strangers
    begun = struct.pack(">ihhih", 500_000, 36, 2, 1, -1)
    strangers = [world.client() for _ in range(50)]
    for stranger in strangers:
        stranger.stream.send([begun])
        stranger.stream.send([b"x"])
    world.run_for(10)
    assert pool.lent_bytes == 0
    assert 0 < of_strangers.lent_bytes <= of_strangers.bytes_max
    # Others log in meanwhile, and then have buffers.
    for mechanism in ("SCRAM-SHA-256", "PLAIN"):
        client, before = world.client(), pool.lent_bytes
        assert not log_in(client, "alice", "wonder", mechanism).error_code
        client.stream.send([struct.pack(">ihhih", 500_000, 0, 9, 1, -1)])
        client.stream.send([b"x"])
        world.run_for(10)
        assert not client.is_closed and pool.lent_bytes > before
    world.run_for(AUTHENTICATION_TIMEOUT_MS + 1_000)
    assert all(each.is_closed for each in strangers) and of_strangers.lent_bytes == 0


def test_a_client_that_does_not_authenticate_in_time_is_closed(world: World) -> None:
    silent, slow, trusted = world.client(), world.client(), world.client()
    choose(slow, "PLAIN")
    log_in(trusted, "alice", "wonder")
    world.run_for(AUTHENTICATION_TIMEOUT_MS - 1_000)
    assert not silent.is_closed and not slow.call(HELLO, 3).error_code
    world.run_for(2_100)
    assert silent.is_closed and slow.is_closed
    assert is_served(trusted)


def test_requests_at_the_wrong_time_are_answered_with_their_error(world: World) -> None:
    client = world.client()
    answer = token(client, b"x")
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
    is_out(world, client)
    client = world.client()
    found = client.call(SaslHandshakeRequest(mechanism="GSSAPI"), 1)
    assert found.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert found.mechanisms == ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"]
    is_out(world, client)
    client = world.client()
    choose(client, "PLAIN")
    switched = client.call(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), 1)
    assert switched.error_code == ErrorCode.ILLEGAL_SASL_STATE
    is_out(world, client)
    client = world.client()
    assert client.call(SaslHandshakeRequest(mechanism="PLAIN"), 0).error_code == ErrorCode.ILLEGAL_SASL_STATE
    is_out(world, client)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"r=client-nonce-of-24-bytes", b"r=Client-nonce-of-24-bytes"),
        (b"r=client-nonce-of-24-bytes", b"r="),
        (b"c=biws", b"c=eSws"),
        (b"c=biws", b"c=cD10bHMtdW5pcXVlLCw="),
        (b"p=", b"p=AAAA"),
        (b",p=", b",x="),
    ],
)
def test_a_scram_proof_for_another_exchange_is_refused(world: World, old: bytes, new: bytes) -> None:
    client = world.client()
    choose(client, "SCRAM-SHA-256")
    exchange = scram.ScramClient("SCRAM-SHA-256", "alice", "wonder", b"client-nonce-of-24-bytes")
    proof = exchange.reply(token(client, exchange.first()).auth_bytes)
    assert old in proof
    answer = token(client, proof.replace(old, new, 1))
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    is_out(world, client)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("PLAIN", b"\0alice\0" + b"x" * 500_000),
        ("PLAIN", b"bob\0alice\0wonder"),
        ("PLAIN", b"alice\0wonder"),
        ("PLAIN", b"\0alice\0\xff"),
        ("PLAIN", b""),
        ("SCRAM-SHA-256", b"p=tls-unique,,n=alice,r=abc"),
        ("SCRAM-SHA-256", b"n,a=bob,n=alice,r=abc"),
        ("SCRAM-SHA-256", b"n,,n=alice,r="),
        ("SCRAM-SHA-256", b"n,,n=alice,r=" + b"a" * 100_000),
        ("SCRAM-SHA-256", b"\0" * 100),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer " + b"a" * 400_000 + b"\x01\x01"),
        ("OAUTHBEARER", b"n,a=bob,\x01auth=Bearer a\x01\x01"),
        ("OAUTHBEARER", b"n,,\x01\x01"),
    ],
)
def test_bad_messages_are_refused_with_one_line(tmp_path: Path, mechanism: str, message: bytes) -> None:
    world = World(LISTENERS | oauth_settings(Issuer().write(tmp_path)))
    put(world, "alice", "wonder")
    client = world.client()
    choose(client, mechanism)
    answer = token(client, message)
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert "\n" not in answer.error_message and len(answer.error_message) < 200
    is_out(world, client)


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "PLAIN"])
def test_a_user_whose_credential_is_gone_is_out_within_a_second(
    world: World, change: str, mechanism: str
) -> None:
    put(world, "bob", "builder")
    put(world, "alice", "wonder", SHA_512)
    alice, bob, other = world.client(), world.client(), world.client()
    log_in(alice, "alice", "wonder", mechanism)
    log_in(other, "alice", "wonder", "SCRAM-SHA-512")
    log_in(bob, "bob", "builder", mechanism)
    if change == "removed":
        remove(world, "alice")
    else:
        put(world, "alice", "new")
    is_out(world, alice)
    world.run_for(1_000)
    assert is_served(bob) and is_served(other), "their credentials are still there"


def test_a_credential_that_is_replaced_during_an_exchange_proves_nothing(world: World) -> None:
    client = world.client()
    choose(client, "SCRAM-SHA-256")
    exchange = scram.ScramClient("SCRAM-SHA-256", "alice", "wonder", b"client-nonce-of-24-bytes")
    proof = exchange.reply(token(client, exchange.first()).auth_bytes)
    put(world, "alice", "new")
    assert token(client, proof).error_message == FAILED_MESSAGE
    is_out(world, client)


def test_a_client_authenticates_again_before_its_session_ends() -> None:
    world = World(LISTENERS | {"connections.max.reauth.ms": "30000"})
    put(world, "alice", "wonder")
    put(world, "bob", "builder")
    client, careless, other = world.client(), world.client(), world.client()
    for each in (client, careless, other):
        assert log_in(each, "alice", "wonder").session_lifetime_ms == 30_000
    world.run_for(28_000)
    assert is_served(client) and is_served(careless)
    assert not log_in(client, "alice", "wonder").error_code
    refused = log_in(other, "bob", "builder")
    assert "the same user" in refused.error_message
    is_out(world, other)
    world.run_for(5_000)
    assert is_served(client)
    careless.send(MetadataRequest(topics=[]), 12)
    is_out(world, careless)


def oauth_settings(url: str) -> dict[str, str]:
    return {
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": url,
        "sasl.oauthbearer.expected.issuer": NAME,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
    }


def test_tokens_are_accepted_until_they_expire(tmp_path: Path) -> None:
    issuer = Issuer()
    world = World(LISTENERS | oauth_settings(issuer.write(tmp_path)))
    now_s = world.clock.wall_ms() / 1000

    def present(client: Client, **claims: Any) -> Any:
        choose(client, "OAUTHBEARER")
        return token(client, oauthbearer.message(issuer.token(now_s, **claims)))

    client = world.client()
    answer = present(client)
    assert not answer.error_code and 80_000 < answer.session_lifetime_ms <= 90_000
    assert is_served(client) and principal(world) == "User:alice"
    for claims, part in (
        ({"exp": now_s - 40}, "expired"),
        ({"aud": "else"}, "audience"),
        ({"iss": "else"}, "issuer"),
        ({"headers": {"kid": "new"}}, "key"),
    ):
        refused = world.client()
        found = present(refused, **claims)
        assert found.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED and part in found.error_message
        is_out(world, refused)
    world.run_for(91_000)
    client.send(MetadataRequest(topics=[]), 12)
    is_out(world, client)


def test_new_keys_are_read_when_a_token_asks_for_them(tmp_path: Path) -> None:
    old, new = Issuer(), Issuer()
    world = World(LISTENERS | oauth_settings(old.write(tmp_path)))
    new.write(tmp_path)
    world.run_for(15_000)
    for issuer, is_accepted in ((new, True), (old, False)):
        client = world.client()
        choose(client, "OAUTHBEARER")
        found = token(client, oauthbearer.message(issuer.token(world.clock.wall_ms() / 1000)))
        assert (found.error_code == 0) == is_accepted
    (tmp_path / "keys.json").unlink()
    world.run_for(15_000)
    client = world.client()
    choose(client, "OAUTHBEARER")
    found = token(client, oauthbearer.message(new.token(world.clock.wall_ms() / 1000)))
    assert found.error_code == 0, "the keys of before stay"


def test_tokens_do_not_have_failing_keys_read_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the issuer has a bad time, strangers must not make it worse."""
    url = "https://issuer.example/keys"
    issuer = Issuer()
    asked: list[str] = []

    def read(url: str) -> bytes:
        asked.append(url)
        if len(asked) > 1:
            raise KeysError("HTTP status 503")
        return issuer.key_set()

    monkeypatch.setattr(token_keys, "read", read)
    world = World(LISTENERS | oauth_settings(url) | {"sasl.oauthbearer.allowed.urls": url})
    for _ in range(60):
        stranger = world.client()
        choose(stranger, "OAUTHBEARER")
        unknown = issuer.token(world.clock.wall_ms() / 1000, headers={"kid": "unknown"})
        assert token(stranger, oauthbearer.message(unknown)).error_code
        world.run_for(900)
    assert 5 <= len(asked) <= 7


def topic_and_fetch(world: World, client: Client) -> FetchRequest:
    """A new topic, and a Fetch that waits for its first record."""
    world.run_until(
        lambda: client.call(MetadataRequest(topics=[MetadataRequestTopic(name="t")]), 1).topics[0].partitions,
        2_000,
    )
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1_000)
    return FetchRequest(
        max_wait_ms=600_000, min_bytes=1, topics=[FetchTopic(topic="t", partitions=[partition])]
    )


def produce_request(size: int) -> ProduceRequest:
    records = memoryview(encode_batch([(1, None, bytes(size), [])]))
    data = TopicProduceData(name="t", partition_data=[PartitionProduceData(index=0, records=records)])
    return ProduceRequest(acks=1, timeout_ms=1_000, topic_data=[data])


def test_a_request_that_waits_is_not_answered_after_the_session() -> None:
    world = World(LISTENERS | {"connections.max.reauth.ms": "3000", "auto.create.topics.enable": "true"})
    put(world, "alice", "wonder")
    client = world.client()
    log_in(client, "alice", "wonder")
    client.send(topic_and_fetch(world, client), 11)
    count = len(client.answers)
    world.run_for(1_000)
    assert not client.is_closed
    is_out(world, client, 4_000)
    assert len(client.answers) == count


def test_a_request_that_waits_is_not_answered_after_the_session_by_who_authenticates_again() -> None:
    world = World(LISTENERS | {"connections.max.reauth.ms": "3000", "auto.create.topics.enable": "true"})
    put(world, "alice", "wonder")
    client = world.client()
    log_in(client, "alice", "wonder")
    client.send(topic_and_fetch(world, client), 11)
    count = len(client.answers)
    world.run_for(2_000)
    client.send(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), 1)
    is_out(world, client, 3_000)
    assert len(client.answers) == count


def test_a_client_that_is_delayed_while_it_authenticates_again_is_not_late() -> None:
    """The broker does not read what it sends, so its time does not run."""
    world = World(LISTENERS | {"connections.max.reauth.ms": "60000", "auto.create.topics.enable": "true"})
    put(world, "alice", "wonder")
    world.broker.throttling.apply({(("user", "alice"),): {CONSUMER_BYTE_RATE: 100.0}})
    client, other = world.client(), world.client()
    for each in (client, other):
        log_in(each, "alice", "wonder", "PLAIN")
    client.send(topic_and_fetch(world, other), 11)
    world.run_for(2_000)
    count = len(client.answers)
    client.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
    world.run_for(10)
    other.call(produce_request(1_600), 9)
    world.run_until(lambda: len(client.answers) == count + 2, 1_000)
    fetched, chosen = client.answers[count:]
    assert fetched.throttle_time_ms > AUTHENTICATION_TIMEOUT_MS + 2_000 and not chosen.error_code
    assert not token(client, plain.message("alice", "wonder")).error_code
    assert is_served(client)


def test_a_client_that_is_delayed_for_its_quota_may_authenticate_again_afterwards() -> None:
    """Its request was sent in time; the broker did not read it."""
    world = World(LISTENERS | {"connections.max.reauth.ms": "30000"})
    put(world, "alice", "wonder")
    world.broker.throttling.apply({(("user", "alice"),): {PRODUCER_BYTE_RATE: 100.0}})
    client = world.client()
    log_in(client, "alice", "wonder")
    world.run_for(27_000)
    delay_ms = client.call(produce_request(1_100), 9).throttle_time_ms
    assert 10_000 < delay_ms < 15_000
    assert not log_in(client, "alice", "wonder").error_code
    assert world.clock.now_ms() > 37_000
    assert is_served(client)


def test_a_flood_of_passwords_waits_in_line_and_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sasl_connections, "CHECKS_WAITING_MAX", 5)
    strangers = [world.client() for _ in range(10)]
    for each in strangers:
        each.send(SaslHandshakeRequest(mechanism="PLAIN"), 1)
        each.send(SaslAuthenticateRequest(auth_bytes=plain.message("alice", "wrong")), 2)
    world.run_for(1)
    assert [each.is_closed for each in strangers] == [False] * 7 + [True] * 3, "two run and five wait"
    # One gives up: its password is not checked.
    strangers[6].stream.close()
    assert not log_in(world.client(), "alice", "wonder").error_code
    world.run_for(1_000)
    assert all(each.is_closed for each in strangers)
    assert [len(each.answers) for each in strangers] == [2] * 6 + [1] + [1] * 3
