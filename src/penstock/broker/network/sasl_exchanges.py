"""What each SASL mechanism does with a client's messages (``Exchange`` of ``authentication.py``).

Passwords are checked against the SCRAM credentials of the cluster's users, also for PLAIN. A name that nobody has
costs as much as any other and is answered in the same way, so that a stranger does not learn who exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from penstock.broker.network.authentication import Challenge, Check, InvalidCredentials, Proven
from penstock.metadata.security import ScramCredential, ScramMechanism
from penstock.sasl import SaslError, oauthbearer, plain, scram

PLAIN = "PLAIN"
OAUTHBEARER = oauthbearer.MECHANISM
SCRAM = {mechanism.sasl_name: mechanism for mechanism in ScramMechanism}
NONCE_BYTES = 18

StoredCredentials = Mapping[tuple[str, ScramMechanism], ScramCredential]


class UsedCredential(NamedTuple):
    """The credential that a user was recognised by."""

    mechanism: ScramMechanism
    stored: ScramCredential


class _Form(NamedTuple):
    """What a client sees of a credential before it has proven anything."""

    iterations: int
    salt_bytes: int
    # Letters and digits, as Kafka's tools and ours make them, or any bytes, as librdkafka does.
    has_text_salt: bool


USUAL_FORM = _Form(scram.ITERATIONS_MIN, scram.SALT_BYTES, True)


class Users:
    """The users of the cluster, and keys for names that nobody has."""

    def __init__(self, stored: Callable[[], StoredCredentials], secret: Callable[[], bytes]) -> None:
        """``secret`` must be the same on all brokers, or strangers could compare them, and unknown to strangers."""
        self._stored = stored
        self._secret = secret
        self._seen: StoredCredentials | None = None
        self._forms: dict[ScramMechanism, _Form] = {}

    def find(self, user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        return self._stored().get((user, mechanism))

    def keys(self, user: str, mechanism: ScramMechanism) -> scram.Keys:
        """The keys of a user, or made-up ones that no password fits."""
        found = self.find(user, mechanism)
        if found is not None:
            return scram.Keys(*found)
        return scram.Keys(self.made_up_salt(user, mechanism), b"", b"", self.usual_iterations(mechanism))

    def made_up_salt(self, user: str, mechanism: ScramMechanism) -> bytes:
        form = self._usual_form(mechanism)
        secret = self._secret()
        if form.has_text_salt:
            return scram.made_up_salt(secret, mechanism.sasl_name, user)[: form.salt_bytes]
        return scram.made_up_bytes(secret, mechanism.sasl_name, user, form.salt_bytes)

    def usual_iterations(self, mechanism: ScramMechanism) -> int:
        return self._usual_form(mechanism).iterations

    def _usual_form(self, mechanism: ScramMechanism) -> _Form:
        """What most credentials of the mechanism look like, so that made-up ones do not stand out.

        Without any, as those of the other one. Brokers may have the credentials in another order, and must agree.
        """
        stored = self._stored()
        if stored is not self._seen:
            self._seen = stored
            counts = {each: Counter[_Form]() for each in ScramMechanism}
            for (_, kind), credential in stored.items():
                counts[kind][_form(credential)] += 1
            both = sum(counts.values(), Counter[_Form]()) or Counter([USUAL_FORM])
            self._forms = {kind: _most_common(found or both) for kind, found in counts.items()}
        return self._forms[mechanism]

    def has(self, proof: Proven) -> bool:
        """Whether the credential that was used is still that of the user."""
        used = proof.credential
        return not isinstance(used, UsedCredential) or self.find(proof.user, used.mechanism) == used.stored


class ScramExchange:
    """Two messages. The proof is checked with a few hashes; the slow derivation is the client's work."""

    def __init__(self, mechanism: ScramMechanism, users: Users, generator: Random) -> None:
        self._mechanism = mechanism
        self._users = users
        self._found: ScramCredential | None = None
        self._has_begun = False
        self._server = scram.ScramServer(
            mechanism.sasl_name,
            self._find,
            scram.nonce_from(generator.randbytes(NONCE_BYTES)),
            lambda user: users.made_up_salt(user, mechanism),
            unknown_iterations=users.usual_iterations(mechanism),
        )

    @property
    def claimed(self) -> str:
        return self._server.claimed

    def step(self, message: bytes) -> Challenge | Proven | Check:
        if not self._has_begun:
            self._has_begun = True
            return Challenge(self._server.first(message))
        signature = self._server.final(message)
        user, found = self._server.user, self._found
        assert user is not None and found is not None
        return Proven(user, signature, UsedCredential(self._mechanism, found))

    def _find(self, user: str) -> scram.Keys | None:
        self._found = self._users.find(user, self._mechanism)
        return None if self._found is None else scram.Keys(*self._found)


class PlainExchange:
    """One message with the password, which is right if it is that of any of the user's credentials."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self.claimed = ""

    def step(self, message: bytes) -> Challenge | Proven | Check:
        _, user, password = plain.parse(message)
        self.claimed = user
        candidates = [(mechanism, self._users.keys(user, mechanism)) for mechanism in ScramMechanism]

        def work() -> Proven:
            # All of them, also after a match: the time tells nobody which credentials exist.
            found = [
                mechanism
                for mechanism, keys in candidates
                if _fits(password, mechanism.sasl_name, keys) and keys.stored_key
            ]
            if not found:
                raise InvalidCredentials("invalid credentials")
            keys = dict(candidates)[found[0]]
            return Proven(user, credential=UsedCredential(found[0], ScramCredential(*keys)))

        return Check(work)


class BearerExchange:
    """One message with a token of somebody whom the broker trusts."""

    def __init__(self, prepare_check: Callable[[str], Callable[[], Proven]]) -> None:
        self._prepare_check = prepare_check
        self.claimed = ""

    def step(self, message: bytes) -> Challenge | Proven | Check:
        return Check(self._prepare_check(oauthbearer.parse(message).token))


def _most_common(forms: Counter[_Form]) -> _Form:
    return max(forms, key=lambda form: (forms[form], form))


def _form(credential: ScramCredential) -> _Form:
    salt = credential.salt
    has_text = len(salt) <= scram.SALT_BYTES and salt.isalnum()
    return _Form(credential.iterations, len(salt), has_text)


def _fits(password: str, mechanism: str, keys: scram.Keys) -> bool:
    try:
        salted = scram.salted_password(mechanism, password, keys.salt, keys.iterations)
    except SaslError:
        return False
    return scram.matches(mechanism, salted, keys)
