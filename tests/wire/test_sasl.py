"""Links that authenticate, against brokers with the server's half of the mechanisms; and the settings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.protocol.apis import API_VERSIONS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.security import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from penstock.sasl import SaslError, client, oauthbearer, plain, scram
from penstock.sasl.client import SaslClient
from penstock.sasl.scram import Keys, ScramServer
from penstock.sasl.settings import SaslSettings
from penstock.wire import AuthenticationFailed, BadSecurity, Client, Unreachable, operations
from penstock.wire.core import FIRST_CONTACT_MS
from penstock.wire.links import State
from penstock.wire.security import Security, client_security
from tests.wire.fake import FakeCluster, FakeShell

HANDSHAKE, AUTHENTICATE = SaslHandshakeRequest.KEY, SaslAuthenticateRequest.KEY
SALT = b"0123456789abcdefghijklmnop"
derived = functools.cache(scram.salted_password)
SCRAM = SaslSettings("SCRAM-SHA-256", "alice", "hunter2")
REFUSED = "Authentication failed during authentication due to invalid credentials"


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "salted_password", derived)


class SaslCluster(FakeCluster):
    """Brokers that answer strangers only about SASL. ``tokens`` are accepted, and ``users`` have passwords."""

    def __init__(self, brokers: int = 1, *, mechanisms: tuple[str, ...] = ("SCRAM-SHA-256",)) -> None:
        super().__init__(brokers)
        self.mechanisms = mechanisms
        self.users = {"alice": "hunter2"}
        self.tokens = {"abc.def"}
        self.lifetime_ms = 0
        # Of the link that is being served, set by the shell.
        self.link = 0
        self.servers: dict[int, tuple[str, ScramServer | None, int]] = {}
        self.authenticated: dict[int, str] = {}
        self.nonces = itertools.count()
        self.alter: Callable[[bytes], bytes] = lambda message: message

    def _saslhandshake(self, broker: int, version: int, request: Any) -> SaslHandshakeResponse:
        assert version == 1, "in version 0 no header would follow"
        error = ErrorCode.NONE
        if request.mechanism not in self.mechanisms:
            error = ErrorCode.UNSUPPORTED_SASL_MECHANISM
        server = None
        if request.mechanism in scram.HASHES:
            nonce = b"server-nonce-%d" % next(self.nonces)
            server = ScramServer(request.mechanism, self._keys(request.mechanism), nonce, lambda _: SALT)
        self.servers[self.link] = (request.mechanism, server, 0)
        return SaslHandshakeResponse(error_code=error, mechanisms=list(self.mechanisms))

    def _keys(self, mechanism: str) -> Callable[[str], Keys | None]:
        def find(user: str) -> Keys | None:
            if user not in self.users:
                return None
            salted = derived(mechanism, self.users[user], SALT, 4096)
            return scram.keys(mechanism, salted, SALT, 4096)

        return find

    def _saslauthenticate(self, broker: int, version: int, request: Any) -> SaslAuthenticateResponse:
        mechanism, server, step = self.servers[self.link]
        self.servers[self.link] = (mechanism, server, step + 1)
        user: str | None = None
        answer = b""
        try:
            if server is not None:
                answer = (server.final if step else server.first)(request.auth_bytes)
                user = server.user
            elif mechanism == "PLAIN":
                _, user, password = plain.parse(request.auth_bytes)
                if self.users.get(user) != password:
                    raise SaslError("wrong")
            elif step:
                assert request.auth_bytes == oauthbearer.ACKNOWLEDGEMENT
                raise SaslError("wrong")
            elif oauthbearer.parse(request.auth_bytes).token in self.tokens:
                user = "token"
            else:
                answer = oauthbearer.refusal()
        except SaslError:
            code = ErrorCode.SASL_AUTHENTICATION_FAILED
            return SaslAuthenticateResponse(error_code=code, error_message=REFUSED, auth_bytes=b"")
        if user is not None:
            self.authenticated[self.link] = user
        return SaslAuthenticateResponse(
            error_message=None, auth_bytes=self.alter(answer), session_lifetime_ms=self.lifetime_ms
        )


class SaslShell(FakeShell):
    cluster: SaslCluster

    def __init__(self, cluster: SaslCluster, settings: SaslSettings | None = SCRAM, **more: Any) -> None:
        nonces = itertools.count()
        sasl = None
        if settings is not None:
            sasl = SaslClient(settings, lambda: b"client-nonce-%d" % next(nonces))
        super().__init__(cluster, sasl=sasl, **more)

    def act(self, number: int) -> None:
        self.cluster.link = number
        key = self.links[number].unread[4:6]
        is_for_strangers = int.from_bytes(key, "big") in (API_VERSIONS, HANDSHAKE, AUTHENTICATE)
        if not is_for_strangers and number not in self.cluster.authenticated:
            self.lose(number)
            return
        super().act(number)

    def topics(self) -> Any:
        return self.ask(lambda core, task: operations.topics(core, task, None))


def asked(cluster: SaslCluster) -> list[int]:
    return [key for _, key, _, _ in cluster.asked]


@pytest.fixture
def cluster() -> SaslCluster:
    made = SaslCluster()
    made.make_topic("orders", [1])
    return made


def test_link_authenticates_before_its_first_request(cluster: SaslCluster) -> None:
    shell = SaslShell(cluster)
    assert set(shell.topics()) == {"orders"}
    assert asked(cluster)[:4] == [API_VERSIONS, HANDSHAKE, AUTHENTICATE, AUTHENTICATE]
    assert list(cluster.authenticated.values()) == ["alice"]
    assert cluster.asked[2][2] == 2, "in the newest version, which has the length of the session"


@pytest.mark.parametrize(
    ("mechanisms", "settings"),
    [
        (("PLAIN",), SaslSettings("PLAIN", "alice", "hunter2")),
        (("SCRAM-SHA-512", "PLAIN"), SaslSettings("SCRAM-SHA-512", "alice", "hunter2")),
        (("OAUTHBEARER",), SaslSettings("OAUTHBEARER", token=lambda: "abc.def")),
    ],
)
def test_every_mechanism_authenticates(mechanisms: tuple[str, ...], settings: SaslSettings) -> None:
    cluster = SaslCluster(mechanisms=mechanisms)
    cluster.make_topic("orders", [1])
    assert set(SaslShell(cluster, settings).topics()) == {"orders"}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"])
def test_refused_client_fails_at_once_with_a_line_that_names_the_user(mechanism: str) -> None:
    cluster = SaslCluster(brokers=2, mechanisms=(mechanism,))
    if mechanism == "OAUTHBEARER":
        settings, who = SaslSettings(mechanism, token=lambda: "not.it"), "the token"
    else:
        settings, who = SaslSettings(mechanism, "alice", "wrong-password"), "user alice"
    shell = SaslShell(cluster, settings, bootstrap="broker-1:9092,broker-2:9092")
    with pytest.raises(AuthenticationFailed) as caught:
        shell.topics()
    assert str(caught.value).endswith(f": the broker did not accept {who} with {mechanism}: {REFUSED}")
    assert str(caught.value).startswith("broker-")
    assert shell.now_ms < 3_000, "a retry would not help"


def test_wrong_password_is_said_although_another_broker_is_down() -> None:
    cluster = SaslCluster(brokers=2)
    cluster.down.add(2)
    wrong = SaslSettings("SCRAM-SHA-256", "alice", "wrong-password")
    shell = SaslShell(cluster, wrong, bootstrap="broker-1:9092,broker-2:9092")
    with pytest.raises(AuthenticationFailed, match="did not accept user alice"):
        shell.topics()


def test_mechanism_that_is_not_offered_is_refused_with_those_that_are() -> None:
    cluster = SaslCluster(mechanisms=("PLAIN", "SCRAM-SHA-512"))
    line = "does not offer SCRAM-SHA-256 there; set sasl.mechanism to one of: PLAIN, SCRAM-SHA-512$"
    with pytest.raises(AuthenticationFailed, match=line):
        SaslShell(cluster).topics()


def test_listener_without_sasl_says_so(cluster: SaslCluster) -> None:
    def answer(broker: int, key: int, version: int, request: Any) -> Any:
        if key == HANDSHAKE:
            return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])
        return None

    cluster.interfere = answer
    with pytest.raises(AuthenticationFailed, match=r"has no SASL there; use security.protocol=plaintext"):
        SaslShell(cluster).topics()
    with pytest.raises(AuthenticationFailed, match=r"has no SASL there; use security.protocol=ssl"):
        SaslShell(cluster, has_tls=True).topics()
    cluster.version_max = {HANDSHAKE: -1, AUTHENTICATE: -1}
    with pytest.raises(AuthenticationFailed, match="has no SASL there"):
        SaslShell(cluster).topics()


def test_client_without_a_user_is_told_what_a_listener_with_sasl_wants(cluster: SaslCluster) -> None:
    shell = SaslShell(cluster, None)
    line = (
        r"reset by peer; does the listener want a user and password \(security.protocol=sasl_plaintext\)\?$"
    )
    with pytest.raises(AuthenticationFailed, match=line):
        shell.topics()
    assert shell.now_ms < 3 * FIRST_CONTACT_MS


def test_broker_that_stops_answering_is_not_taken_for_one_with_sasl(cluster: SaslCluster) -> None:
    shell = SaslShell(cluster, None)
    cluster.authenticated = dict.fromkeys(range(1, 100), "anybody")
    shell.topics()
    cluster.authenticated = {}
    shell.lose(next(iter(shell.links)))
    with pytest.raises(Unreachable) as caught:
        shell.topics()
    assert "security.protocol" not in str(caught.value)


def test_broker_that_does_not_know_the_password_itself_is_not_trusted(cluster: SaslCluster) -> None:
    cluster.alter = lambda message: (
        message.replace(b"v=", b"v=AAAA") if message.startswith(b"v=") else message
    )
    with pytest.raises(AuthenticationFailed, match="cannot authenticate user alice with SCRAM-SHA-256: "):
        SaslShell(cluster).topics()


def test_words_of_a_broker_become_part_of_one_line(cluster: SaslCluster) -> None:
    def answer(broker: int, key: int, version: int, request: Any) -> Any:
        if key == AUTHENTICATE:
            words = "no\r\n\x1b[31mway" + "!" * 5_000
            code = ErrorCode.SASL_AUTHENTICATION_FAILED
            return SaslAuthenticateResponse(error_code=code, error_message=words, auth_bytes=b"")
        return None

    cluster.interfere = answer
    with pytest.raises(AuthenticationFailed, match=r"SCRAM-SHA-256: no") as caught:
        SaslShell(cluster).topics()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_password_is_derived_once_for_all_connections(
    cluster: SaslCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    derivations: list[object] = []

    def counted(*arguments: Any) -> bytes:
        derivations.append(arguments)
        return derived(*arguments)

    monkeypatch.setattr(client, "salted_password", counted)
    shell = SaslShell(cluster)
    for _ in range(3):
        shell.topics()
        shell.lose(next(iter(shell.links)))
    assert len(cluster.authenticated) == 3 and len(derivations) == 1


def test_token_is_fetched_for_each_connection(cluster: SaslCluster) -> None:
    cluster.mechanisms = ("OAUTHBEARER",)
    cluster.tokens = {"one", "two"}
    tokens = iter(["one", "two"])
    shell = SaslShell(cluster, SaslSettings("OAUTHBEARER", token=lambda: next(tokens)))
    for _ in range(2):
        shell.topics()
        shell.lose(next(iter(shell.links)))
    # The third has none.
    with pytest.raises(
        AuthenticationFailed, match="cannot authenticate the token with OAUTHBEARER: no token"
    ):
        shell.topics()


# Sessions that end


def test_link_authenticates_again_before_its_session_ends(cluster: SaslCluster) -> None:
    cluster.lifetime_ms = 100_000
    shell = SaslShell(cluster)
    shell.topics()
    shell.wait(84_000)
    cluster.asked.clear()
    shell.topics()
    assert HANDSHAKE not in asked(cluster)
    shell.wait(12_000)
    cluster.asked.clear()
    shell.topics()
    assert asked(cluster)[:3] == [HANDSHAKE, AUTHENTICATE, AUTHENTICATE], "on the same connection"
    assert len(cluster.authenticated) == 1
    cluster.asked.clear()
    shell.wait(50_000)
    shell.topics()
    assert HANDSHAKE not in asked(cluster), "a new session began"


def test_requests_wait_while_a_link_authenticates_again(cluster: SaslCluster) -> None:
    cluster.lifetime_ms = 100_000
    shell = SaslShell(cluster)
    shell.topics()
    number = next(iter(shell.links))
    # One is in flight when the next one comes too late in the session.
    before = shell.start("asking", lambda core, task: operations.topics(core, task, None))
    shell.now_ms += 96_000
    cluster.asked.clear()
    after = [shell.start("asking", lambda core, task: operations.topics(core, task, None)) for _ in range(2)]
    link = shell.core.links._by_id[number]
    assert link.state is State.READY and len(link.waiting) == 2
    for task in (before, *after):
        assert set(shell.result(task)) == {"orders"}
    keys = asked(cluster)
    assert keys[1:4] == [HANDSHAKE, AUTHENTICATE, AUTHENTICATE]
    assert HANDSHAKE not in (keys[0], *keys[4:]) and len(keys) == 6


def test_user_who_was_removed_fails_after_a_while(cluster: SaslCluster) -> None:
    cluster.lifetime_ms = 10_000
    shell = SaslShell(cluster)
    shell.topics()
    cluster.users.clear()
    shell.wait(10_000)
    begun_ms = shell.now_ms
    with pytest.raises(AuthenticationFailed, match="did not accept user alice"):
        shell.topics()
    assert FIRST_CONTACT_MS <= shell.now_ms - begun_ms < 2 * FIRST_CONTACT_MS


def test_broker_that_falls_silent_during_sasl_is_given_up(cluster: SaslCluster) -> None:
    from tests.wire.fake import SILENCE

    cluster.interfere = lambda broker, key, version, request: SILENCE if key == AUTHENTICATE else None
    with pytest.raises(Unreachable, match="silent"):
        SaslShell(cluster).topics()


def test_connection_that_is_lost_during_sasl_is_tried_again(cluster: SaslCluster) -> None:
    shell = SaslShell(cluster)
    task = shell.start("asking", lambda core, task: operations.topics(core, task, None))
    shell.run(lambda: AUTHENTICATE in asked(cluster))
    shell.lose(next(iter(shell.links)))
    assert "while user alice was authenticated" in (task.trouble or "")
    assert set(shell.result(task)) == {"orders"}


# Settings

USER = {"sasl.username": "alice", "sasl.password": "hunter2"}
LOGIN = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-256", **USER}


def variants() -> Iterator[tuple[dict[str, str], str]]:
    yield {**LOGIN, "sasl.mechanism": ""}, "sasl.mechanism is missing; use SCRAM-SHA-512"
    yield {**LOGIN, "sasl.mechanism": "GSSAPI"}, "sasl.mechanism: GSSAPI is not supported; use SCRAM-SHA-512"
    yield {**LOGIN, "sasl.mechanism": "hunter2 hunter2 hunter2"}, "sasl.mechanism: this is not supported"
    yield {**LOGIN, "sasl.mechanisms": "PLAIN"}, "sasl.mechanism and sasl.mechanisms are two names"
    yield {**LOGIN, "sasl.username": ""}, "sasl.username is missing"
    yield {**LOGIN, "sasl.password": ""}, "sasl.password is missing"
    yield {**LOGIN, "sasl.password": "hunter2\0"}, "sasl.password contains a zero byte"
    yield {**LOGIN, "sasl.password": "hunter2\ud800"}, "sasl.password cannot be written as UTF-8"
    yield (
        {**LOGIN, "security.protocol": "ssl"},
        "sasl.mechanism needs security.protocol=sasl_ssl or sasl_plain",
    )
    yield {**LOGIN, "security.protocol": "SASL"}, "security.protocol: not plaintext, ssl, sasl_plaintext or"
    yield USER, "security.protocol is missing; sasl.username needs security.protocol=sasl_ssl"
    yield (
        {**LOGIN, "sasl.mechanism": "OAUTHBEARER"},
        "sasl.mechanism=OAUTHBEARER needs a function that returns",
    )
    yield (
        {"sasl.jaas.config": "hunter2"},
        "sasl.jaas.config is a setting of Java's clients; use sasl.username",
    )
    yield {"sasl.oauthbearer.client.secret": "hunter2"}, "sasl.oauthbearer.client.secret is not supported"
    yield {"sasl.kerberos.keytab": "hunter2"}, "sasl.kerberos.keytab is not supported"
    yield {"sasl.pasword": "hunter2"}, "unknown setting sasl.pasword; did you mean sasl.password?"


@pytest.mark.parametrize(("security", "line"), list(variants()))
def test_bad_settings_are_refused_in_one_line_without_secrets(security: dict[str, str], line: str) -> None:
    with pytest.raises(BadSecurity) as caught:
        Client("127.0.0.1:1", security=security)
    assert str(caught.value).startswith(line)
    assert str(caught.value).isprintable() and "hunter2" not in str(caught.value)


def test_settings_mean_what_librdkafka_means() -> None:
    for name in ("sasl.mechanism", "sasl.mechanisms"):
        how = client_security(
            {
                "security.protocol": "SASL_PLAINTEXT",
                name: "scram-sha-512",
                "sasl.username": "a",
                "sasl.password": " b ",
            }
        )
        assert how == Security(None, SaslSettings("SCRAM-SHA-512", "a", " b "))
    both = client_security({**LOGIN, "security.protocol": "sasl_ssl"})
    assert both.tls is not None and both.sasl == SCRAM
    token = client_security({**LOGIN, "sasl.mechanism": "OAUTHBEARER"}, token=lambda: "x")
    assert token.sasl is not None and token.sasl.token is not None
    with pytest.raises(BadSecurity, match="a token needs"):
        client_security({}, token=lambda: "x")


def test_passwords_are_in_no_repr() -> None:
    how = client_security(LOGIN)
    made = SaslClient(SCRAM, lambda: b"nonce")
    assert "hunter2" not in f"{how!r} {how.sasl!r} {made!r} {made.exchange()!r}"
    assert "alice" in repr(how)
