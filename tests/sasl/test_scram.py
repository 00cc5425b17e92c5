"""SCRAM: the RFC's example, what is refused, altered bytes, and the clients of others."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sasl import MESSAGE_BYTES_MAX, SaslError, scram
from penstock.sasl.scram import Keys, ScramClient, ScramServer

# RFC 7677, section 3.
USER, PASSWORD = "user", "pencil"
CLIENT_NONCE = b"rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = b"%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p="
    b"dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
SHA256, SHA512 = "SCRAM-SHA-256", "SCRAM-SHA-512"
SECRET = bytes(range(32))
# Most tests use one password and one salt.
derived = functools.cache(scram.salted_password)


def keys_of(
    mechanism: str = SHA256, password: str = PASSWORD, salt: bytes = SALT, iterations: int = 4096
) -> Keys:
    return scram.keys(
        mechanism, scram.salted_password(mechanism, password, salt, iterations), salt, iterations
    )


KEYS = keys_of()


def server(
    mechanism: str = SHA256, user: str = USER, keys: Keys | None = KEYS, nonce: bytes = SERVER_NONCE
) -> ScramServer:
    return ScramServer(
        mechanism,
        lambda name: keys if name == user else None,
        nonce,
        lambda name: scram.made_up_salt(SECRET, mechanism, name),
    )


def client(mechanism: str = SHA256, user: str = USER, password: str = PASSWORD) -> ScramClient:
    return ScramClient(mechanism, user, password, CLIENT_NONCE)


def converse(
    one: ScramClient,
    other: ScramServer,
    alter: Callable[[int, bytes], bytes] = lambda _, message: message,
    password: str = PASSWORD,
) -> None:
    """A whole exchange. ``alter`` may change each of the four messages on its way."""
    first = other.first(alter(0, one.first()))
    one.check()
    other.check()
    salted = derived(one.mechanism, password, *one.challenged(alter(1, first)))
    final = other.final(alter(2, one.answer(salted)))
    one.check()
    other.check()
    one.finish(alter(3, final))
    one.check()


def test_exchange_is_the_one_of_the_rfc() -> None:
    one, other = client(), server()
    assert one.first() == CLIENT_FIRST
    assert other.first(CLIENT_FIRST) == SERVER_FIRST
    assert one.reply(SERVER_FIRST) == CLIENT_FINAL
    assert other.user is None
    assert other.final(CLIENT_FINAL) == SERVER_FINAL
    one.finish(SERVER_FINAL)
    assert one.is_done and other.user == USER


@pytest.mark.parametrize("mechanism", [SHA256, SHA512])
@pytest.mark.parametrize("user", ["alice", "a=b,c", "=2C", "=3D=2C,", "Jörg 王", "a b\t"])
def test_names_of_all_kinds_are_proven(mechanism: str, user: str) -> None:
    one, other = client(mechanism, user), server(mechanism, user, keys_of(mechanism))
    converse(one, other)
    assert one.is_done and other.user == user


def test_passwords_are_not_normalised() -> None:
    """SASLprep would make these equal; Kafka and librdkafka do not apply it."""
    composed, decomposed = "\u00e9", "e\u0301"
    assert keys_of(password=composed).stored_key != keys_of(password=decomposed).stored_key


def test_wrong_password_is_refused() -> None:
    one, other = client(), server()
    with pytest.raises(SaslError, match=r"^invalid credentials$"):
        converse(one, other, password="pencils")
    assert other.user is None


def test_unknown_user_meets_the_same_steps_and_words_as_a_wrong_password() -> None:
    answers = []
    for _ in range(2):
        one, other = client(user="nobody"), server()
        answers.append(other.first(one.first()))
        with pytest.raises(SaslError, match=r"^invalid credentials$"):
            other.final(one.reply(answers[-1]))
        assert other.user is None
    assert answers[0] == answers[1], "a salt that changes would give the unknown away"
    other_name = server().first(client(user="nobody2").first())
    assert other_name.split(b",s=")[1] != answers[0].split(b",s=")[1]
    salt = base64.b64decode(answers[0].split(b",s=")[1].split(b",")[0])
    assert len(salt) == len(scram.salt_from(bytes(17))) == 26


def test_unknown_user_is_refused_whatever_the_proof_is() -> None:
    """Even somebody who has the key that stands in for the missing one gets nowhere."""
    no_key = Keys(scram.made_up_salt(SECRET, SHA256, "nobody"), bytes(32), bytes(32), 4096)
    for keys in (None, no_key):
        one, other = client(user="nobody"), server(user="nobody", keys=keys)
        with pytest.raises(SaslError):
            converse(one, other)
        assert other.user is None


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "cut short"),
        (b"n,,", "malformed"),
        (b"n,,n=user", "without the attributes"),
        (b"n,,r=abc,n=user", "without the attributes"),
        (b"n,,n=user,r=", "malformed"),
        (b"n,,n=,r=abc", "malformed"),
        (b"n,,n=us=er,r=abc", "name"),
        (b"n,,n=us=2cer,r=abc", "name"),
        (b"n,,n=us\0er,r=abc", "malformed"),
        (b"n,,n=user,r=a bc", "nonce"),
        (b"n,,n=user,r=\xc3\xa9", "nonce"),
        (b"n,,n=user,n=user,r=abc", "twice"),
        (b"n,,n=user,r=abc,r=abc", "twice"),
        (b"n,,m=x,n=user,r=abc", "extensions"),
        (b"n,,n=user,r=abc,m=x", "extensions"),
        (b"p=tls-exporter,,n=user,r=abc", "channel binding is not supported"),
        (b"x,,n=user,r=abc", "header"),
        (b"n,b=user,n=user,r=abc", "header"),
        (b"n,a=admin,n=user,r=abc", "another user"),
        (b"n,,n=user,r=abc,tokenauth=true", "delegation tokens"),
        (b"n,,n=user,r=abc,tokenauth=TRUE", "delegation tokens"),
        (b"n,,n=us\xffer,r=abc", "UTF-8"),
        (b"n,,n=" + b"u" * MESSAGE_BYTES_MAX + b",r=abc", "more than"),
    ],
)
def test_malformed_first_message_is_refused(message: bytes, why: str) -> None:
    other = server()
    with pytest.raises(SaslError, match=why) as refused:
        other.first(message)
    assert "\n" not in str(refused.value)
    with pytest.raises(SaslError, match="not expected"):
        other.first(CLIENT_FIRST)


@pytest.mark.parametrize(
    "message", [b"y,,n=user,r=abc", b"n,a=user,n=user,r=abc", b"n,,n=user,r=abc,tokenauth=false,x=y"]
)
def test_other_headers_and_optional_extensions_are_accepted(message: bytes) -> None:
    assert server().first(message).startswith(b"r=abc" + SERVER_NONCE)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (CLIENT_FINAL.replace(b"biws", b"eSws"), "channel binding"),
        (CLIENT_FINAL.replace(b"rOpr", b""), "nonce"),
        # CVE-2024-56128: only the server's own part, or only the client's.
        (CLIENT_FINAL.replace(CLIENT_NONCE, b""), "nonce"),
        (CLIENT_FINAL.replace(SERVER_NONCE, b""), "nonce"),
        (CLIENT_FINAL.replace(CLIENT_NONCE, 3 * CLIENT_NONCE), "nonce"),
        (CLIENT_FINAL.partition(b",p=")[0], "without the attributes"),
        (CLIENT_FINAL[:-2] + b"==", "proof"),
        # The same proof in another spelling of Base64.
        (CLIENT_FINAL[:-2] + b"R=", "proof"),
        (CLIENT_FINAL + b",x=y", "without the attributes"),
        (b"c=biws,r=x,m=1,p=AAAA", "extensions"),
        (b"", "malformed"),
    ],
)
def test_malformed_final_message_is_refused(message: bytes, why: str) -> None:
    other = server()
    other.first(CLIENT_FIRST)
    with pytest.raises(SaslError, match=why):
        other.final(message)
    with pytest.raises(SaslError, match="not expected"):
        other.final(CLIENT_FINAL)
    assert other.user is None


def test_librdkafka_before_2_6_1_may_repeat_its_nonce() -> None:
    one, other = client(), server()
    challenge = one.challenged(other.first(one.first()))
    one._nonce = CLIENT_NONCE.decode() + one._nonce
    one.finish(other.final(one.answer(derived(SHA256, PASSWORD, *challenge))))
    assert one.is_done and other.user == USER


def test_repeated_nonce_of_another_exchange_is_refused() -> None:
    one, other = client(), server()
    challenge = one.challenged(server(nonce=b"anotherNonceOfTheServer").first(one.first()))
    other.first(CLIENT_FIRST)
    one._nonce = CLIENT_NONCE.decode() + one._nonce
    with pytest.raises(SaslError, match="nonce"):
        other.final(one.answer(derived(SHA256, PASSWORD, *challenge)))
    assert other.user is None


def test_proof_before_the_first_message_is_refused() -> None:
    with pytest.raises(SaslError, match="not expected"):
        server().final(CLIENT_FINAL)


def test_recorded_exchange_cannot_be_repeated() -> None:
    other = server(nonce=b"anotherNonceOfTheServer")
    other.first(CLIENT_FIRST)
    with pytest.raises(SaslError, match="nonce"):
        other.final(CLIENT_FINAL)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (SERVER_FIRST.replace(b"4096", b"4095"), "below 4096"),
        (SERVER_FIRST.replace(b"4096", b"1000001"), "more than 1000000"),
        (SERVER_FIRST.replace(b"4096", b"9" * 40), "number"),
        (SERVER_FIRST.replace(b"4096", b"04096"), "number"),
        (SERVER_FIRST.replace(b"4096", b"-4096"), "number"),
        (SERVER_FIRST.replace(SERVER_NONCE, b""), "nonce"),
        (SERVER_FIRST.replace(CLIENT_NONCE, b""), "nonce"),
        (SERVER_FIRST.replace(b"W22Z", b"W2!Z"), "salt"),
        (b"m=x," + SERVER_FIRST, "extensions"),
        (b"e=unknown-user", "the broker says unknown-user"),
        (b"e=<script>", "a reason of its own"),
        (b"", "malformed"),
    ],
)
def test_client_refuses_a_malformed_challenge(message: bytes, why: str) -> None:
    one = client()
    one.first()
    with pytest.raises(SaslError, match=why):
        one.challenged(message)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"v=" + base64.b64encode(bytes(32)), "does not know the password itself"),
        (b"v=AAAA", "does not know the password itself"),
        (b"e=invalid-proof", "the broker says invalid-proof"),
        (b"", "malformed"),
        (b"x=AAAA", "without the attributes"),
    ],
)
def test_client_refuses_a_server_that_does_not_prove_itself(message: bytes, why: str) -> None:
    one = client()
    one.first()
    one.reply(SERVER_FIRST)
    with pytest.raises(SaslError, match=why):
        one.finish(message)
    assert not one.is_done


def test_neither_names_nor_passwords_show_in_reprs() -> None:
    one, other = client(password="hunter2"), server()
    other.first(one.first())
    assert "hunter2" not in repr(one) and "user" not in repr(other) + repr(one)


def test_password_that_is_not_text_is_refused_without_showing_it() -> None:
    with pytest.raises(SaslError, match="password cannot be written") as refused:
        scram.salted_password(SHA256, "hunter\ud800", SALT, 4096)
    assert "hunter" not in str(refused.value)
    with pytest.raises(SaslError, match="user name"):
        client(user="\ud800").first()
    with pytest.raises(SaslError, match="user name"):
        client(user="").first()


def test_salted_password_matches_its_keys_alone() -> None:
    assert scram.matches(SHA256, scram.salted_password(SHA256, PASSWORD, SALT, 4096), KEYS)
    assert not scram.matches(SHA256, scram.salted_password(SHA256, "pencils", SALT, 4096), KEYS)


@given(
    user=st.text(min_size=1).filter(lambda text: "\0" not in text), noise=st.binary(min_size=17, max_size=40)
)
@settings(deadline=None, max_examples=60)
def test_client_and_server_agree_on_any_name(user: str, noise: bytes) -> None:
    one = ScramClient(SHA256, user, PASSWORD, scram.nonce_from(noise))
    other = server(user=user)
    try:
        converse(one, other)
    except SaslError:
        with pytest.raises(UnicodeEncodeError):
            user.encode()
    else:
        assert one.is_done and other.user == user


@given(data=st.data(), which=st.integers(0, 3), other_byte=st.integers(1, 255))
@settings(deadline=None, max_examples=150)
def test_no_altered_byte_authenticates(data: st.DataObject, which: int, other_byte: int) -> None:
    def alter(number: int, message: bytes) -> bytes:
        if number != which:
            return message
        place = data.draw(st.integers(0, len(message) - 1))
        altered = bytearray(message)
        altered[place] ^= other_byte
        return bytes(altered)

    one, other = client(), server()
    with pytest.raises(SaslError):
        converse(one, other, alter)
    # The last message comes when the server is already sure; the client must not be.
    assert not one.is_done and (other.user is None) == (which < 3)


@given(first=st.binary(max_size=80), final=st.binary(max_size=80))
@settings(deadline=None)
def test_garbage_is_refused_and_nothing_else(first: bytes, final: bytes) -> None:
    one, other = client(), server()
    one.first()
    with pytest.raises(SaslError):
        other.first(first)
    with pytest.raises(SaslError):
        one.challenged(first)
    other = server()
    other.first(CLIENT_FIRST)
    with pytest.raises(SaslError):
        other.final(final)


@pytest.mark.parametrize("mechanism", [SHA256, SHA512])
def test_client_of_kafka_python_is_served(mechanism: str) -> None:
    from kafka.net.sasl.scram import ScramClient as Theirs

    theirs, other = (
        Theirs("alice", "secret", mechanism),
        server(mechanism, "alice", keys_of(mechanism, "secret")),
    )
    theirs.process_server_first_message(other.first(theirs.first_message()))
    theirs.process_server_final_message(other.final(theirs.final_message()))
    assert other.user == "alice"


@pytest.mark.parametrize("mechanism", [SHA256, SHA512])
def test_client_of_aiokafka_is_served(mechanism: str) -> None:
    from aiokafka.conn import ScramAuthenticator

    theirs = ScramAuthenticator(
        loop=None, sasl_plain_password="secret", sasl_plain_username="a,b=c", sasl_mechanism=mechanism
    )
    other = server(mechanism, "a,b=c", keys_of(mechanism, "secret"))
    theirs.process_server_first_message(other.first(theirs.first_message().encode()).decode())
    theirs.process_server_final_message(other.final(theirs.final_message().encode()).decode())
    assert other.user == "a,b=c"
