"""The secret that all nodes of a cluster share, in a file on each of them.

The file has one line, or two while the secret is replaced: the new one and the old one. Nodes with either are
admitted, and a node that connects tries both. It is read again when it changes, so a secret is replaced without a
restart: put ``new, old`` on every node, then ``new``.

As with ssh's keys, a file that others can read is refused. The secret never appears in logs or errors.
"""

from __future__ import annotations

from penstock.sasl.scram import ITERATIONS_MIN, Keys, keys, salt_from, salted_password
from penstock.tls.pem import TlsSettingsError
from penstock.tls.private_file import PrivateFile

MECHANISM = "SCRAM-SHA-512"
# The secret is random, so it cannot be guessed, and more iterations would protect nothing.
ITERATIONS = ITERATIONS_MIN
SETTING = "penstock.internal.secret.file"
LINES_MAX = 2
# 18 random bytes in base 64. Somebody who has seen an exchange may try as many secrets as they like.
CHARACTERS_MIN = 24
# For what all nodes derive alike: it needs no salt of its own kind, only another one than those of the exchanges.
COMMON_SALT = b"what all nodes derive from it"
# Of nodes, each with its salt, for each line.
DERIVED_MAX = 1000


class NodeSecret:
    def __init__(self, path: str, salt_seed: bytes) -> None:
        """Read the file; ``salt_seed`` is random. Raises TlsSettingsError."""
        self._file = PrivateFile(SETTING, path)
        self._salt = salt_from(salt_seed)
        self._version = self._file.version()
        # Why the file that is there now is not used, as reported; None if it is used.
        self.failure: str | None = None
        # In the order of the file.
        self.lines: tuple[str, ...]
        # What this node checks proofs against, one for each line.
        self.keys: tuple[Keys, ...]
        # The same on all nodes, and known to nobody else.
        self.derived_by_all: bytes
        self._use(self._read())
        # Salted secrets for the salts of other nodes, because deriving one takes some milliseconds.
        self._derived: dict[tuple[str, bytes, int], bytes] = {}

    def __repr__(self) -> str:
        return f"NodeSecret({self._file.path})"

    def reload(self) -> bool:
        """Read the file if it has changed. False if there is nothing new, or it cannot be used (``failure``)."""
        version = self._file.version()
        if version == self._version:
            self.failure = None
            return False
        try:
            self._use(self._read())
        except TlsSettingsError as error:
            self.failure = str(error)
            return False
        self._version = version
        self.failure = None
        self._derived.clear()
        return True

    def derived(self, secret: str, salt: bytes, iterations: int) -> bytes | None:
        """The salted secret, if it was derived before."""
        return self._derived.get((secret, salt, iterations))

    def keep(self, secret: str, salt: bytes, iterations: int, salted: bytes) -> None:
        if len(self._derived) >= DERIVED_MAX:
            self._derived.clear()
        self._derived[secret, salt, iterations] = salted

    def _use(self, lines: tuple[str, ...]) -> None:
        self.lines = lines
        self.keys = tuple(
            keys(MECHANISM, salted_password(MECHANISM, line, self._salt, ITERATIONS), self._salt, ITERATIONS)
            for line in lines
        )
        # From the old secret as long as it is there: until then some nodes may have no other.
        self.derived_by_all = salted_password(MECHANISM, lines[-1], COMMON_SALT, ITERATIONS)

    def _read(self) -> tuple[str, ...]:
        data, where = self._file.read(), self._file
        try:
            lines = tuple(line.strip() for line in data.decode("ascii").splitlines() if line.strip())
        except UnicodeDecodeError:
            lines = ("\0",)
        if not all(line.isprintable() for line in lines):
            raise TlsSettingsError(f"{where}: a secret has letters, digits and punctuation only")
        if not 1 <= len(lines) <= LINES_MAX:
            raise TlsSettingsError(f"{where}: one line is expected, or two, the new secret and the old one")
        if any(len(line) < CHARACTERS_MIN for line in lines):
            raise TlsSettingsError(
                f"{where}: a secret has at least {CHARACTERS_MIN} characters, as `openssl rand -base64 32` makes"
            )
        return lines
