"""Tokens for OAUTHBEARER: JSON Web Tokens (RFC 7519), checked against the keys of who issues them (RFC 7517).

Signature, issuer, audience and expiry are always checked; there is no option to leave one out. Algorithms are those
with a public key: a token without a signature, or signed with a shared secret, is refused whatever the keys say.

The only module that needs PyJWT, which it imports when it is first used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.sasl import SaslError

TOKEN_BYTES_MAX = 16 * 1024
KEYS_BYTES_MAX = 256 * 1024
KEYS_MAX = 100
RSA_BITS_MIN = 2048
USER_LENGTH_MAX = 1_000
# Algorithms by type of key, and for elliptic curves by the curve.
ALGORITHMS = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
}
MISSING = 'tokens need PyJWT; install "penstock-mq[oauth]"'


class KeysError(Exception):
    """The keys cannot be used. One line, which contains nothing of what was read."""


class UnknownKey(SaslError):
    """The token names a key that is not there. It may be newer than our keys."""


class Key(NamedTuple):
    id: str | None
    algorithms: tuple[str, ...]
    public: Any


class Rules(NamedTuple):
    issuer: str
    # The token must be for one of them.
    audience: tuple[str, ...]
    # The claim that is the name of the user.
    subject: str = "sub"
    # By how much the clocks may differ.
    skew_s: int = 30


class Verified(NamedTuple):
    user: str
    # When the token is no longer accepted, as seconds since 1970: its expiry and the skew.
    until_s: float


def require_library() -> None:
    """Raises KeysError."""
    try:
        import jwt  # noqa: F401, PLC0415 - an optional dependency
        from cryptography.hazmat.primitives import hashes  # noqa: F401, PLC0415
    except ImportError:
        raise KeysError(MISSING) from None


def parse_keys(data: bytes) -> tuple[Key, ...]:
    """The usable keys of a JSON Web Key Set. Raises KeysError."""
    require_library()
    if len(data) > KEYS_BYTES_MAX:
        raise KeysError(f"more than {KEYS_BYTES_MAX} bytes")
    try:
        entries = json.loads(data)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KeysError("not a JSON Web Key Set") from None
    if not isinstance(entries, list) or len(entries) > KEYS_MAX:
        raise KeysError(f"not a list of at most {KEYS_MAX} keys")
    found = [key for key in map(_key, entries) if key is not None]
    if not found:
        raise KeysError("no key in it can verify a signature (RSA of 2048 bits or more, or EC)")
    return tuple(found)


def verify(token: str, keys: Iterable[Key], rules: Rules, now_s: float) -> Verified:
    """Check a token; takes up to a millisecond. Raises SaslError, which contains nothing of the token."""
    import jwt  # noqa: PLC0415 - an optional dependency

    if len(token) > TOKEN_BYTES_MAX:
        raise SaslError(f"a token of more than {TOKEN_BYTES_MAX} bytes")
    try:
        header = jwt.get_unverified_header(token)
        key, algorithm = _choose(keys, header)
        # Only the signature: the claims are checked below, with the time that we are given.
        claims = json.loads(jwt.PyJWS().decode(token, key.public, algorithms=[algorithm]))
    except SaslError:
        raise
    except jwt.InvalidSignatureError:
        raise SaslError("the signature of the token is wrong") from None
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError):
        # Their messages may contain parts of the token.
        raise SaslError("the token is malformed") from None
    if not isinstance(claims, dict):
        raise SaslError("the token is malformed")
    return _checked(claims, rules, now_s)


def _checked(claims: Mapping[str, Any], rules: Rules, now_s: float) -> Verified:
    if claims.get("iss") != rules.issuer:
        raise SaslError("the token is from another issuer")
    audience = claims.get("aud")
    if isinstance(audience, str):
        audience = [audience]
    if not isinstance(audience, list) or not any(each in audience for each in rules.audience):
        raise SaslError("the token is for another audience")
    expires_s = _time(claims, "exp")
    if expires_s is None:
        raise SaslError("the token has no expiry")
    if now_s >= expires_s + rules.skew_s:
        raise SaslError("the token has expired")
    for claim in ("nbf", "iat"):
        starts_s = _time(claims, claim)
        if starts_s is not None and now_s < starts_s - rules.skew_s:
            raise SaslError("the token is not valid yet")
    user = claims.get(rules.subject)
    if not isinstance(user, str) or not user.strip() or len(user) > USER_LENGTH_MAX or not user.isprintable():
        raise SaslError("the token does not name a user")
    return Verified(user, expires_s + rules.skew_s)


def _time(claims: Mapping[str, Any], claim: str) -> float | None:
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SaslError(f"the token has a malformed {claim}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or abs(seconds) > 1e11:
        raise SaslError(f"the token has a malformed {claim}")
    return seconds


def _choose(keys: Iterable[Key], header: Mapping[str, Any]) -> tuple[Key, str]:
    algorithm, id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or not any(algorithm in each for each in ALGORITHMS.values()):
        raise SaslError("the token has an algorithm that is not accepted")
    # Extensions that the issuer says must be understood; we understand none.
    if "crit" in header or header.get("b64", True) is not True:
        raise SaslError("the token has critical extensions")
    if id is not None and not isinstance(id, str):
        raise SaslError("the token is malformed")
    fitting = [key for key in keys if algorithm in key.algorithms and (id is None or key.id == id)]
    if len(fitting) != 1:
        raise UnknownKey(
            "the token does not name a key of the issuer" if fitting or id is None else "unknown key"
        )
    return fitting[0], algorithm


def _key(entry: Any) -> Key | None:
    """None for a key that cannot verify signatures, or that is too weak."""
    import jwt  # noqa: PLC0415 - an optional dependency
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey  # noqa: PLC0415

    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or "d" in entry:
        return None
    operations = entry.get("key_ops")
    if operations is not None and not (isinstance(operations, list) and "verify" in operations):
        return None
    type = entry.get("kty")
    curve = entry.get("crv", "") if type == "EC" else ""
    if not isinstance(type, str) or not isinstance(curve, str):
        return None
    algorithms = ALGORITHMS.get((type, curve), ())
    if "alg" in entry:
        algorithms = tuple(each for each in algorithms if each == entry["alg"])
    if not algorithms:
        return None
    try:
        public = jwt.PyJWK(entry, algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if not isinstance(public, (EllipticCurvePublicKey, RSAPublicKey)):
        return None
    if isinstance(public, RSAPublicKey) and public.key_size < RSA_BITS_MIN:
        return None
    id = entry.get("kid")
    return Key(id if isinstance(id, str) else None, algorithms, public)
