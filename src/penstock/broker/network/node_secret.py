"""The secret that all nodes of a cluster share, in a file on each of them.

The file has one line, or two while the secret is replaced: the new one and the old one. Nodes with either are
admitted, and a node that connects tries both. It is read again when it changes, so a secret is replaced without a
restart: put ``new, old`` on every node, then ``new``.

As with ssh's keys, a file that others can read is refused. The secret never appears in logs or errors.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from penstock.sasl.scram import ITERATIONS_MIN, Keys, keys, salt_from, salted_password

MECHANISM = "SCRAM-SHA-512"
# The secret is random, so it cannot be guessed, and more iterations would protect nothing.
ITERATIONS = ITERATIONS_MIN
SETTING = "penstock.internal.secret.file"
LINES_MAX = 2
# 18 random bytes in base 64. Somebody who has seen an exchange may try as many secrets as they like.
CHARACTERS_MIN = 24
FILE_BYTES_MAX = 4096
# Of nodes, each with its salt, for each line.
DERIVED_MAX = 1000


class SecretError(ValueError):
    """The file cannot be used. The message is one line that names it, without its content."""


class _Version(NamedTuple):
    modified_ns: int
    changed_ns: int
    size: int
    inode: int


class NodeSecret:
    def __init__(self, path: str, salt_seed: bytes) -> None:
        """Read the file; ``salt_seed`` is random. Raises SecretError."""
        self._path = path
        self._salt = salt_from(salt_seed)
        self._version = self._current_version()
        # Why the file that is there now is not used, as reported; None if it is used.
        self.failure: str | None = None
        # In the order of the file.
        self.lines: tuple[str, ...]
        # What this node checks proofs against, one for each line.
        self.keys: tuple[Keys, ...]
        self._use(self._read())
        # Salted secrets for the salts of other nodes, because deriving one takes some milliseconds.
        self._derived: dict[tuple[str, bytes, int], bytes] = {}

    def __repr__(self) -> str:
        return f"NodeSecret({self._path})"

    def reload(self) -> bool:
        """Read the file if it has changed. False if there is nothing new, or it cannot be used (``failure``)."""
        version = self._current_version()
        if version == self._version:
            self.failure = None
            return False
        try:
            self._use(self._read())
        except SecretError as error:
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

    def _current_version(self) -> _Version | None:
        try:
            status = os.stat(self._path)
        except (OSError, ValueError):
            return None
        return _Version(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    def _read(self) -> tuple[str, ...]:
        where = f"{SETTING} {self._path}"
        try:
            with open(self._path, "rb") as file:
                # Of the open file: another one may be put in its place meanwhile.
                status = os.fstat(file.fileno())
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise SecretError(f"{where}: {error.strerror or 'cannot be read'}") from None
        except ValueError:
            raise SecretError(f"{SETTING}: not the path of a file") from None
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SecretError(f"{where}: others on this machine may use the secret; chmod 600 {self._path}")
        if status.st_uid not in (os.geteuid(), 0):
            raise SecretError(f"{where}: the file belongs to another user")
        if len(data) > FILE_BYTES_MAX:
            raise SecretError(f"{where}: larger than {FILE_BYTES_MAX} bytes")
        try:
            lines = tuple(line.strip() for line in data.decode("ascii").splitlines() if line.strip())
        except UnicodeDecodeError:
            lines = ("\0",)
        if not all(line.isprintable() for line in lines):
            raise SecretError(f"{where}: a secret has letters, digits and punctuation only")
        if not 1 <= len(lines) <= LINES_MAX:
            raise SecretError(f"{where}: one line is expected, or two, the new secret and the old one")
        if any(len(line) < CHARACTERS_MIN for line in lines):
            raise SecretError(
                f"{where}: a secret has at least {CHARACTERS_MIN} characters, as `openssl rand -base64 32` makes"
            )
        return lines
