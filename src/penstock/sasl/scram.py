"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): both sides prove a password, without sending it.

    client                                          server
    n,,n=USER,r=NONCE                         ->                                          first()
                                              <-    r=NONCE+MORE,s=SALT,i=ITERATIONS
    c=biws,r=NONCE+MORE,p=PROOF               ->                                          final()
                                              <-    v=SIGNATURE

The server stores two keys that come from the password through a slow function. They are enough to check the proof,
and not enough to make one. The signature proves to the client that the server has them.

There is no channel binding, as in Kafka: a client may say that it has none (``n``) or that it believes the server
has none (``y``). Kafka's extension ``tokenauth`` is for delegation tokens, which do not exist here.

A name that nobody has gets a salt like any other, the same at each attempt, and fails at the proof like a wrong
password, so that a stranger does not learn who exists.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from penstock.sasl import SaslError, decode_text, encode_text

# Names of mechanisms and of their hash in hashlib.
HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
# What Kafka allows for new credentials.
ITERATIONS_MIN = 4096
ITERATIONS_MAX = 16_384
# A client computes what a server asks for, up to about a second of one core.
CLIENT_ITERATIONS_MAX = 1_000_000
# RFC 5802, section 7: what a server may say with e=. Anything else is not repeated to the user.
_SERVER_ERRORS = frozenset(
    (
        "invalid-encoding",
        "extensions-not-supported",
        "invalid-proof",
        "channel-bindings-dont-match",
        "server-does-support-channel-binding",
        "channel-binding-not-supported",
        "unsupported-channel-binding-type",
        "unknown-user",
        "invalid-username-encoding",
        "no-resources",
        "other-error",
    )
)
_DIGITS32 = b"0123456789abcdefghijklmnopqrstuv"
# Of salts in the form of Kafka's tools.
SALT_BYTES = 26


class Keys(NamedTuple):
    """What a server stores of a password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


class Challenge(NamedTuple):
    """With what a client has to derive its salted password."""

    salt: bytes
    iterations: int


# Derivation


def salted_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """The slow step: some milliseconds, for which an event loop should use a thread. Raises SaslError."""
    assert iterations > 0
    return hashlib.pbkdf2_hmac(HASHES[mechanism], encode_text(password, "password"), salt, iterations)


def keys(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> Keys:
    """What a server stores, from a salted password."""
    client_key = _hmac(mechanism, salted, b"Client Key")
    server_key = _hmac(mechanism, salted, b"Server Key")
    return Keys(salt, _hash(mechanism, client_key), server_key, iterations)


def matches(mechanism: str, salted: bytes, known: Keys) -> bool:
    """Whether a salted password is the one of these keys. For PLAIN, where the server sees the password."""
    found = keys(mechanism, salted, known.salt, known.iterations)
    return hmac.compare_digest(found.stored_key, known.stored_key)


def salt_from(random: bytes) -> bytes:
    """A salt from at least 17 random bytes, in the form of Kafka's tools: 26 letters and digits.

    All salts have the same form, or the made-up ones would stand out.
    """
    assert len(random) >= 17
    number = int.from_bytes(random, "big")
    return bytes(_DIGITS32[number >> 5 * place & 31] for place in range(SALT_BYTES))


def made_up_salt(secret: bytes, mechanism: str, user: str) -> bytes:
    """The salt of a user who does not exist. ``secret`` is the same for all who are asked, and stays."""
    return salt_from(hmac.digest(secret, f"{mechanism},{user}".encode(), "sha256"))


def made_up_bytes(secret: bytes, mechanism: str, user: str, size: int) -> bytes:
    """The same with any bytes, as other tools make salts."""
    key = hmac.digest(secret, f"{mechanism},{user}".encode(), "sha256")
    return b"".join(hmac.digest(key, bytes([place]), "sha256") for place in range(-(-size // 32)))[:size]


def nonce_from(random: bytes) -> bytes:
    """A nonce from random bytes; RFC 5802 allows printable characters without the comma."""
    assert len(random) >= 16
    return base64.b64encode(random)


# The exchange


class _Step(Enum):
    FIRST = auto()
    FINAL = auto()
    # Proven, or failed.
    OVER = auto()


class ScramServer:
    """The server's side of one exchange, to which each message of the client is given once."""

    def __init__(
        self,
        mechanism: str,
        find: Callable[[str], Keys | None],
        nonce: bytes,
        salt_of: Callable[[str], bytes],
        *,
        unknown_iterations: int = ITERATIONS_MIN,
    ) -> None:
        """``find`` knows the users' keys; ``salt_of`` makes up a salt for a name that has none."""
        assert mechanism in HASHES and _is_nonce(nonce.decode())
        self._mechanism = mechanism
        self._find = find
        self._own_nonce = nonce.decode()
        self._salt_of = salt_of
        self._unknown_iterations = unknown_iterations
        self._step = _Step.FIRST
        # From the first message on.
        self._claimed = ""
        self._keys = Keys(b"", b"", b"", 0)
        self._is_known = False
        self._nonce = ""
        self._client_nonce = ""
        self._gs2_header = ""
        self._signed = ""
        # The user, once proven. Never set before.
        self.user: str | None = None

    @property
    def claimed(self) -> str:
        """The name that the client gave, for logs; empty before the first message."""
        return self._claimed

    def first(self, message: bytes) -> bytes:
        """Answer the client's first message with salt and iterations. Raises SaslError."""
        self._expect(_Step.FIRST)
        header, bare = _split_gs2(decode_text(message))
        attributes = _attributes(bare, ("n", "r"))
        user = _unescaped(attributes["n"])
        if header.authzid not in ("", attributes["n"]):
            raise SaslError("acting as another user is not supported; leave the authorization id empty")
        if attributes.get("tokenauth", "").lower() == "true":
            raise SaslError("delegation tokens are not supported")
        if not _is_nonce(attributes["r"]):
            raise SaslError("a SCRAM nonce with characters that are not allowed")
        found = self._find(user)
        self._is_known = found is not None
        no_key = bytes(hashlib.new(HASHES[self._mechanism]).digest_size)
        self._keys = found or Keys(self._salt_of(user), no_key, no_key, self._unknown_iterations)
        self._claimed = user
        self._gs2_header = header.text
        self._client_nonce = attributes["r"]
        self._nonce = self._client_nonce + self._own_nonce
        salt = base64.b64encode(self._keys.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._keys.iterations}"
        self._signed = f"{bare},{answer}"
        self._step = _Step.FINAL
        return answer.encode()

    def final(self, message: bytes) -> bytes:
        """Check the proof and answer with the signature. ``user`` is set if it returns. Raises SaslError."""
        self._expect(_Step.FINAL)
        text = decode_text(message)
        without_proof, comma, _ = text.rpartition(",p=")
        attributes = _attributes(text, ("c", "r"), last="p")
        if _decoded(attributes["c"], "channel binding") != self._gs2_header.encode():
            raise SaslError("the channel binding is not the one of the first message")
        # All of it, not only that it ends with ours: otherwise a recorded exchange could be repeated. librdkafka
        # before 2.6.1 puts its own nonce in front once more.
        nonces = (self._nonce, self._client_nonce + self._nonce)
        if not any([hmac.compare_digest(attributes["r"].encode(), nonce.encode()) for nonce in nonces]):
            raise SaslError("the SCRAM nonce is not the one of this exchange")
        proof = _decoded(attributes["p"], "proof")
        assert comma
        signed = f"{self._signed},{without_proof}".encode()
        client_key = _xor(proof, _hmac(self._mechanism, self._keys.stored_key, signed))
        is_right = hmac.compare_digest(_hash(self._mechanism, client_key), self._keys.stored_key)
        signature = _hmac(self._mechanism, self._keys.server_key, signed)
        if not is_right or not self._is_known:
            raise SaslError("invalid credentials")
        self.user = self._claimed
        return b"v=" + base64.b64encode(signature)

    def check(self) -> None:
        """Assert what holds between two messages."""
        if self.user is not None:
            assert self._is_known and self._step is _Step.OVER and self.user == self._claimed
        assert (self._step is not _Step.FINAL) or self._nonce.endswith(self._own_nonce)

    def __repr__(self) -> str:
        return f"ScramServer({self._mechanism}, {self._step.name})"

    def _expect(self, step: _Step) -> None:
        """A message that comes at the wrong time ends the exchange, and so does one that is refused."""
        expected, self._step = self._step, _Step.OVER
        if expected is not step:
            raise SaslError("a SCRAM message that is not expected now")


class ScramClient:
    """The client's side of one exchange: ``first``, ``reply`` (or ``challenged`` and ``answer``), ``finish``."""

    def __init__(self, mechanism: str, user: str, password: str, nonce: bytes) -> None:
        assert mechanism in HASHES and _is_nonce(nonce.decode())
        self.mechanism = mechanism
        self._user = user
        self._password = password
        self._own_nonce = nonce.decode()
        self._bare = ""
        self._nonce = ""
        self._server_first = ""
        self._challenge: Challenge | None = None
        self._signature: bytes | None = None
        # The server has proven that it knows the password too.
        self.is_done = False

    def first(self) -> bytes:
        encode_text(self._user, "user name")
        self._bare = f"n={_escaped(self._user)},r={self._own_nonce}"
        return f"n,,{self._bare}".encode()

    def reply(self, server_first: bytes) -> bytes:
        """The second message. Derives the salted password, which takes a while. Raises SaslError."""
        challenge = self.challenged(server_first)
        return self.answer(salted_password(self.mechanism, self._password, *challenge))

    def challenged(self, server_first: bytes) -> Challenge:
        """Take the server's first message; ``answer`` continues with what was derived. Raises SaslError."""
        assert self._bare and self._challenge is None
        text = decode_text(server_first)
        if text.startswith("e="):
            raise SaslError(_server_error(text))
        attributes = _attributes(text, ("r", "s", "i"))
        nonce = attributes["r"]
        if not nonce.startswith(self._own_nonce) or nonce == self._own_nonce or not _is_nonce(nonce):
            raise SaslError("the broker did not continue our SCRAM nonce")
        salt = _decoded(attributes["s"], "salt")
        iterations = _number(attributes["i"])
        if iterations < ITERATIONS_MIN:
            raise SaslError(
                f"the broker asks for {iterations} SCRAM iterations, below {ITERATIONS_MIN}; "
                "a listener could guess the password"
            )
        if iterations > CLIENT_ITERATIONS_MAX:
            raise SaslError(f"the broker asks for more than {CLIENT_ITERATIONS_MAX} SCRAM iterations")
        self._nonce, self._server_first = nonce, text
        self._challenge = Challenge(salt, iterations)
        return self._challenge

    def answer(self, salted: bytes) -> bytes:
        """The second message, from the salted password of the challenge."""
        assert self._challenge is not None and self._signature is None
        known = keys(self.mechanism, salted, *self._challenge)
        without_proof = f"c=biws,r={self._nonce}"
        signed = f"{self._bare},{self._server_first},{without_proof}".encode()
        client_key = _hmac(self.mechanism, salted, b"Client Key")
        proof = _xor(client_key, _hmac(self.mechanism, known.stored_key, signed))
        self._signature = _hmac(self.mechanism, known.server_key, signed)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def finish(self, server_final: bytes) -> None:
        """Check that the server knows the password too. Raises SaslError."""
        assert self._signature is not None and not self.is_done
        text = decode_text(server_final)
        if text.startswith("e="):
            raise SaslError(_server_error(text))
        signature = _decoded(_attributes(text, ("v",))["v"], "signature")
        if not hmac.compare_digest(signature, self._signature):
            raise SaslError("the broker does not know the password itself; is it the right broker?")
        self.is_done = True

    def check(self) -> None:
        """Assert what holds between two messages."""
        assert not self.is_done or self._signature is not None
        assert self._signature is None or self._challenge is not None
        assert self._challenge is None or self._nonce.startswith(self._own_nonce)

    def __repr__(self) -> str:
        return f"ScramClient({self.mechanism})"


# Messages


class _Gs2Header(NamedTuple):
    text: str
    # As it stands there, escaped.
    authzid: str


def _split_gs2(message: str) -> tuple[_Gs2Header, str]:
    """The client's first message: the header about channel binding, and the rest."""
    parts = message.split(",", 2)
    if len(parts) != 3:
        raise SaslError("a SCRAM message that is cut short")
    binding, authzid, bare = parts
    if binding.startswith("p="):
        raise SaslError("channel binding is not supported; use SCRAM without -PLUS")
    if binding not in ("n", "y"):
        raise SaslError("a SCRAM message without a header")
    if authzid:
        if not authzid.startswith("a="):
            raise SaslError("a SCRAM message with a header that is wrong")
        authzid = authzid[2:]
        _unescaped(authzid)
    return _Gs2Header(message[: len(message) - len(bare)], authzid), bare


def _attributes(text: str, first: tuple[str, ...], *, last: str = "") -> dict[str, str]:
    """The attributes of a message. These are first, in this order; then extensions; then perhaps ``last``."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value or not name.isascii() or not name.isalpha() or "\0" in value:
            raise SaslError("a SCRAM message that is malformed")
        if name == "m":
            # RFC 5802, section 5.1: a mandatory extension, of which there is none.
            raise SaslError("SCRAM extensions are not supported")
        if name in found:
            raise SaslError("a SCRAM message with an attribute twice")
        found[name] = value
    names = list(found)
    if tuple(names[: len(first)]) != first or (
        last and (last not in names[len(first) :] or names[-1] != last)
    ):
        raise SaslError("a SCRAM message without the attributes that belong there")
    return found


def _escaped(user: str) -> str:
    if not user or "\0" in user:
        raise SaslError("the user name is empty or contains a zero byte")
    return user.replace("=", "=3D").replace(",", "=2C")


def _unescaped(text: str) -> str:
    if not text or text.count("=") != text.count("=2C") + text.count("=3D"):
        raise SaslError("a SCRAM message with a name that is malformed")
    return text.replace("=2C", ",").replace("=3D", "=")


def _is_nonce(text: str) -> bool:
    return bool(text) and all("\x21" <= each <= "\x7e" and each != "," for each in text)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or text.startswith("0"):
        raise SaslError("a SCRAM message with a number that is malformed")
    return int(text)


def _decoded(text: str, what: str) -> bytes:
    """Base64 in its one canonical form: an altered message must never mean the same."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        decoded = b""
    if not decoded or base64.b64encode(decoded).decode() != text:
        raise SaslError(f"a SCRAM message with a {what} that is malformed")
    return decoded


def _server_error(text: str) -> str:
    error = text.partition("=")[2].partition(",")[0]
    return (
        f"the broker says {error}"
        if error in _SERVER_ERRORS
        else "the broker refused, for a reason of its own"
    )


def _hash(mechanism: str, message: bytes) -> bytes:
    return hashlib.new(HASHES[mechanism], message).digest()


def _hmac(mechanism: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, HASHES[mechanism])


def _xor(left: bytes, right: bytes) -> bytes:
    if len(left) != len(right):
        raise SaslError("a SCRAM message with a proof that is malformed")
    return bytes(a ^ b for a, b in zip(left, right))
