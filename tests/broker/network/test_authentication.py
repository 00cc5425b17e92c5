"""The state machine of authentication: what it admits, what it answers, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.network.authentication import (
    API_VERSIONS,
    AUTHENTICATION_TIMEOUT_MS,
    BEFORE_AUTHENTICATION,
    FAILED_MESSAGE,
    REAUTHENTICATION_INTERVAL_MS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Answer,
    Authentication,
    Challenge,
    Check,
    Exchange,
    InvalidCredentials,
    Proven,
    State,
)
from penstock.protocol.apis import APIS
from penstock.protocol.errors import ErrorCode
from penstock.sasl import SaslError

PRODUCE = 0
TOKEN_BYTES_MAX = 1_000


class Scripted:
    """A mechanism whose messages say what becomes of them."""

    claimed = "claimed"

    def __init__(self, lifetime_ms: int | None = None) -> None:
        self._lifetime_ms = lifetime_ms

    def step(self, message: bytes) -> Challenge | Proven | Check:
        kind, _, user = message.decode().partition(" ")
        if kind == "more":
            return Challenge(b"go on")
        if kind == "slow":
            return Check(lambda: Proven(user))
        if kind == "proof":
            return Proven(user, b"done", lifetime_ms=self._lifetime_ms)
        raise InvalidCredentials("a reason for the log") if kind == "wrong" else SaslError("malformed")


MECHANISMS: dict[str, Callable[[], Exchange]] = {
    "A": Scripted,
    "B": Scripted,
    "SHORT": lambda: Scripted(lifetime_ms=5_000),
}


def started(*, session_ms_max: int = 0, gone: set[str] | None = None) -> Authentication:
    return Authentication(
        MECHANISMS,
        0,
        token_bytes_max=TOKEN_BYTES_MAX,
        session_ms_max=session_ms_max,
        is_current=lambda proof: proof.user not in (gone or ()),
    )


def authenticated(mechanism: str = "A", *, session_ms_max: int = 0) -> Authentication:
    core = started(session_ms_max=session_ms_max)
    core.handshake(mechanism, 1, 0)
    core.authenticate(b"proof alice", 0)
    assert core.state is State.AUTHENTICATED
    core.check()
    return core


def answer(found: Answer | Check) -> Answer:
    assert isinstance(found, Answer)
    return found


def test_only_three_apis_are_admitted_before_authentication() -> None:
    core = started()
    for key in range(-5, 100):
        assert (core.refusal(key, 0) is None) == (key in (17, 18, 36))
    assert core.refusal(PRODUCE, 0) == "a request of API 0 before authentication"


def test_a_proof_in_two_messages_authenticates() -> None:
    core = started()
    assert core.handshake("A", 1, 1) == Answer()
    assert core.authenticate(b"more", 2) == Answer(token=b"go on")
    assert core.refusal(PRODUCE, 3) is not None
    assert core.authenticate(b"proof alice", 4) == Answer(token=b"done")
    assert core.refusal(PRODUCE, 10**9) is None
    assert core.session is not None and core.session.proof.user == "alice"


def test_nothing_is_taken_while_a_thread_checks() -> None:
    core = started()
    core.handshake("A", 1, 0)
    check = core.authenticate(b"slow alice", 0)
    assert isinstance(check, Check) and core.is_busy
    for key in BEFORE_AUTHENTICATION:
        assert core.refusal(key, 0) is not None
    assert core.checked(check.work(), 5) == Answer()
    assert not core.is_busy and core.state is State.AUTHENTICATED


def test_a_wrong_password_is_not_told_from_a_wrong_user() -> None:
    core = started()
    core.handshake("A", 1, 0)
    found = answer(core.authenticate(b"wrong", 0))
    assert (found.error, found.message) == (ErrorCode.SASL_AUTHENTICATION_FAILED, FAILED_MESSAGE)
    assert found.reason == "a reason for the log"
    assert core.is_busy and core.refusal(SASL_HANDSHAKE, 0) is not None


def test_a_mechanism_that_is_not_enabled_is_refused() -> None:
    core = started()
    assert core.handshake("GSSAPI", 1, 0).error == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert core.state is State.FAILED


@pytest.mark.parametrize("before", ["INITIAL", "AUTHENTICATED"])
def test_a_token_without_a_handshake_is_out_of_place(before: str) -> None:
    core = started() if before == "INITIAL" else authenticated()
    assert answer(core.authenticate(b"proof alice", 0)).error == ErrorCode.ILLEGAL_SASL_STATE
    assert core.state is State.FAILED


def test_the_mechanism_cannot_be_switched() -> None:
    core = started()
    core.handshake("A", 1, 0)
    assert core.handshake("B", 1, 0).error == ErrorCode.ILLEGAL_SASL_STATE
    assert core.state is State.FAILED


def test_tokens_without_headers_are_not_served() -> None:
    core = started()
    assert core.handshake("A", 0, 0).error == ErrorCode.ILLEGAL_SASL_STATE
    assert core.state is State.FAILED


def test_a_token_that_is_too_long_is_refused() -> None:
    core = started()
    core.handshake("A", 1, 0)
    found = answer(core.authenticate(b"proof " + b"a" * TOKEN_BYTES_MAX, 0))
    assert found.error == ErrorCode.SASL_AUTHENTICATION_FAILED


def test_there_is_a_deadline_until_the_proof() -> None:
    core = started()
    assert not core.is_late(AUTHENTICATION_TIMEOUT_MS - 1)
    core.handshake("A", 1, AUTHENTICATION_TIMEOUT_MS - 1)
    assert core.is_late(AUTHENTICATION_TIMEOUT_MS)
    core.authenticate(b"proof alice", AUTHENTICATION_TIMEOUT_MS)
    assert not core.is_late(10**9)


def test_the_time_of_a_stranger_runs_also_while_nobody_reads_what_it_sends() -> None:
    core = started()
    core.not_heard(AUTHENTICATION_TIMEOUT_MS - 1)
    assert core.is_late(AUTHENTICATION_TIMEOUT_MS)
    core = authenticated()
    core.not_heard(2_000)
    assert core.deadline_ms is None
    core.handshake("A", 1, 2_000)
    core.not_heard(9_000)
    assert not core.is_late(2_000 + AUTHENTICATION_TIMEOUT_MS)
    assert core.is_late(9_000 + AUTHENTICATION_TIMEOUT_MS)


def test_the_shorter_of_setting_and_proof_is_the_life_of_a_session() -> None:
    for mechanism, setting_ms, lifetime_ms in (
        ("A", 0, 0),
        ("A", 3_000, 3_000),
        ("SHORT", 0, 5_000),
        ("SHORT", 3_000, 3_000),
        ("SHORT", 9_000, 5_000),
    ):
        core = started(session_ms_max=setting_ms)
        core.handshake(mechanism, 1, 7)
        assert answer(core.authenticate(b"proof alice", 7)).session_lifetime_ms == lifetime_ms
        assert core.has_ended(7 + lifetime_ms) == (lifetime_ms > 0)
        assert not core.has_ended(7 + max(0, lifetime_ms - 1))


def test_a_session_that_ended_admits_only_a_new_handshake() -> None:
    core = authenticated(session_ms_max=3_000)
    assert core.refusal(PRODUCE, 2_999) is None
    for key in (PRODUCE, API_VERSIONS, SASL_AUTHENTICATE):
        assert core.refusal(key, 3_000) == "the session has ended, and the client did not authenticate again"
    assert core.refusal(SASL_HANDSHAKE, 3_000) is None
    assert core.handshake("A", 1, 3_000) == Answer()
    assert core.refusal(PRODUCE, 3_001) == "a request of API 0 during authentication"
    assert not answer(core.authenticate(b"proof alice", 3_001)).error
    assert core.refusal(PRODUCE, 6_000) is None
    assert core.refusal(PRODUCE, 6_001) is not None


def test_a_handshake_right_after_another_is_refused_without_harm() -> None:
    core = authenticated()
    assert core.handshake("A", 1, REAUTHENTICATION_INTERVAL_MS - 1).error == ErrorCode.ILLEGAL_SASL_STATE
    assert core.state is State.AUTHENTICATED
    assert core.handshake("A", 1, REAUTHENTICATION_INTERVAL_MS) == Answer()
    assert core.deadline_ms == REAUTHENTICATION_INTERVAL_MS + AUTHENTICATION_TIMEOUT_MS


@pytest.mark.parametrize(
    ("mechanism", "user", "part"), [("A", "bob", "the same user"), ("B", "alice", "the same mechanism")]
)
def test_nobody_becomes_somebody_else(mechanism: str, user: str, part: str) -> None:
    core = authenticated()
    assert core.handshake(mechanism, 1, 5_000) == Answer()
    found = answer(core.authenticate(f"proof {user}".encode(), 5_000))
    assert found.error == ErrorCode.SASL_AUTHENTICATION_FAILED and part in (found.message or "")
    assert core.state is State.FAILED
    assert core.session is not None and core.session.proof.user == "alice"


def test_a_credential_that_was_changed_meanwhile_proves_nothing() -> None:
    gone = {"alice"}
    core = started(gone=gone)
    core.handshake("A", 1, 0)
    found = answer(core.authenticate(b"proof alice", 0))
    assert (found.error, found.message) == (ErrorCode.SASL_AUTHENTICATION_FAILED, FAILED_MESSAGE)
    core = started(gone=gone)
    core.handshake("A", 1, 0)
    core.authenticate(b"proof bob", 0)
    assert core.is_current()
    gone.add("bob")
    assert not core.is_current()


class AnySequence(RuleBasedStateMachine):
    """Whatever a client sends, in any order: nothing but three APIs is admitted before a proof."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.core = started(session_ms_max=20_000)
        self.check: Check | None = None
        # What the client has proven; the model of the state machine.
        self.user: str | None = None

    def sends(self, key: int) -> bool:
        refusal = self.core.refusal(key, self.now_ms)
        if self.user is None and key not in BEFORE_AUTHENTICATION:
            assert refusal is not None
        if self.core.is_busy:
            assert refusal is not None
        return refusal is None

    @rule(ms=st.integers(0, 15_000))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(key=st.sampled_from(sorted(APIS)) | st.integers(-(2**15), 2**15 - 1))
    def any_request(self, key: int) -> None:
        if self.sends(key) and key not in BEFORE_AUTHENTICATION:
            assert self.user is not None and self.core.state is State.AUTHENTICATED
            assert self.core.session is not None and self.core.session.proof.user == self.user

    @rule(mechanism=st.sampled_from(("A", "B", "SHORT", "GSSAPI", "")), version=st.integers(0, 1))
    def handshake(self, mechanism: str, version: int) -> None:
        if self.sends(SASL_HANDSHAKE):
            found = self.core.handshake(mechanism, version, self.now_ms)
            assert (found.error == ErrorCode.NONE) == (self.core.state is State.CHOSEN)

    @rule(
        kind=st.sampled_from(("more", "slow", "proof", "wrong", "rubbish")),
        user=st.sampled_from(("alice", "bob")),
    )
    def authenticate(self, kind: str, user: str) -> None:
        if self.sends(SASL_AUTHENTICATE):
            found = self.core.authenticate(f"{kind} {user}".encode(), self.now_ms)
            if isinstance(found, Check):
                self.check = found
            else:
                self.answered(found, user)

    @precondition(lambda self: self.check is not None)
    @rule(user=st.sampled_from(("alice", "bob")))
    def checked(self, user: str) -> None:
        self.check = None
        self.answered(self.core.checked(Proven(user), self.now_ms), user)

    @precondition(lambda self: self.check is not None)
    @rule()
    def check_failed(self) -> None:
        self.check = None
        assert self.core.failed(InvalidCredentials("no")).error == ErrorCode.SASL_AUTHENTICATION_FAILED

    def answered(self, found: Answer, user: str) -> None:
        if self.core.state is State.AUTHENTICATED:
            assert found.error == ErrorCode.NONE
            assert self.user in (None, user), "one user for the whole life of a connection"
            self.user = user
        elif found.error:
            assert self.core.state is State.FAILED

    @invariant()
    def holds(self) -> None:
        self.core.check()
        assert (self.core.session is None) == (self.user is None)
        assert self.core.is_busy == (self.check is not None or self.core.state is State.FAILED)


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnySequence = AnySequence.TestCase


@given(st.binary(max_size=50))
@settings(max_examples=50, deadline=None)
def test_an_answer_never_repeats_what_the_client_sent(token: bytes) -> None:
    core = started()
    core.handshake("A", 1, 0)
    try:
        found = answer(core.authenticate(b"x" + token, 0))
    except UnicodeDecodeError:
        return  # of the scripted mechanism
    assert found.message == "Authentication failed: malformed"
