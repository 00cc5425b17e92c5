"""Somebody who issues tokens: keys of several kinds, and tokens signed with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

NAME = "https://issuer.example"
AUDIENCE = "kafka"


class Issuer:
    def __init__(self) -> None:
        self.rsa = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.ec = ec.generate_private_key(ec.SECP256R1())

    def key_set(self) -> bytes:
        keys = [
            {**json.loads(RSAAlgorithm.to_jwk(self.rsa.public_key())), "kid": "rsa", "use": "sig"},
            {**json.loads(ECAlgorithm.to_jwk(self.ec.public_key())), "kid": "ec"},
            {"kty": "oct", "kid": "shared", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"},
        ]
        return json.dumps({"keys": keys}).encode()

    def write(self, directory: Path) -> str:
        """The URL of a file with the keys."""
        path = directory / "keys.json"
        path.write_bytes(self.key_set())
        return path.as_uri()

    def token(
        self,
        now_s: float,
        *,
        algorithm: str = "ES256",
        headers: dict[str, Any] | None = None,
        key: Any = None,
        **claims: Any,
    ) -> str:
        """A valid token, unless told otherwise. A claim that is None is left out."""
        default_key, id = (self.ec, "ec") if algorithm.startswith("ES") else (self.rsa, "rsa")
        every = {"iss": NAME, "aud": AUDIENCE, "sub": "alice", "iat": now_s, "exp": now_s + 60, **claims}
        given = {name: value for name, value in every.items() if value is not None}
        return jwt.encode(
            given, key or default_key, algorithm=algorithm, headers={"kid": id, **(headers or {})}
        )
