"""PEM text: read from a file or given inline, split into blocks, and loaded into a context.

With ``private_file``, the only module of this package that uses the file system. OpenSSL, as Python has it, loads a
private key only from a file. So it gets the key through a file in memory, or a temporary one that nobody else may
read and that is removed at once. Texts and passwords do not appear in errors or in ``repr``.
"""

from __future__ import annotations

import base64
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

PEM_BYTES_MAX = 4 * 1024 * 1024
# OpenSSL's PEM_BUFSIZE.
PASSWORD_BYTES_MAX = 1024

_blocks = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_JAVA_KEYSTORE = b"\xfe\xed\xfe\xed"
_SEQUENCE = b"\x30"


class TlsSettingsError(ValueError):
    """A setting is wrong, or its file. The message is one line that names both."""


class FileVersion(NamedTuple):
    """Tells whether a file was changed or replaced."""

    modified_ns: int
    # Also when only its permissions or its owner were changed, which is how a file that cannot be read is repaired.
    changed_ns: int
    size: int
    inode: int


@dataclass(frozen=True, slots=True)
class Block:
    label: str
    text: str = field(repr=False)

    @property
    def is_certificate(self) -> bool:
        return self.label in ("CERTIFICATE", "TRUSTED CERTIFICATE", "X509 CERTIFICATE")

    @property
    def is_key(self) -> bool:
        return self.label.endswith("PRIVATE KEY")

    @property
    def is_encrypted(self) -> bool:
        return self.label.startswith("ENCRYPTED") or "Proc-Type: 4,ENCRYPTED" in self.text


@dataclass(frozen=True, slots=True)
class Pem:
    """Where the value of a setting is: in a file, or in the setting itself."""

    setting: str
    path: str | None = None
    inline: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # A path is shown in errors, so it must not be a key that was put into the wrong setting.
        if self.path is not None and ("-----BEGIN" in self.path or "\n" in self.path):
            raise TlsSettingsError(f"{self.setting}: the path of a file is expected here, not PEM text")

    def __str__(self) -> str:
        return self.setting if self.path is None else f"{self.setting} {self.path}"

    def version(self) -> FileVersion | None:
        """None for inline text, and while the file is missing."""
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return FileVersion(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    def is_exposed(self) -> bool:
        """Whether other users of this machine may read the file."""
        if self.path is None:
            return False
        try:
            return bool(os.stat(self.path).st_mode & (stat.S_IRGRP | stat.S_IROTH))
        except (OSError, ValueError):
            return False

    def blocks(self) -> list[Block]:
        """The blocks of the text, in order. Raises TlsSettingsError if there is none or one is cut off."""
        text = self.inline if self.inline is not None else self._read()
        blocks = [Block(match[1], _wrapped(match[1], match[2])) for match in _blocks.finditer(text)]
        if not blocks or len(blocks) != text.count("-----BEGIN "):
            raise TlsSettingsError(f"{self}: not PEM, or cut off")
        for block in blocks:
            if block.is_certificate and _decoded(block) is None:
                raise TlsSettingsError(f"{self}: a certificate in it is damaged")
            if block.is_key and not block.text.isascii():
                raise TlsSettingsError(f"{self}: the private key in it is damaged")
        return blocks

    def certificates(self) -> list[Block]:
        found = [block for block in self.blocks() if block.is_certificate]
        if not found:
            raise TlsSettingsError(f"{self}: no certificate in it")
        return found

    def key(self) -> Block:
        found = [block for block in self.blocks() if block.is_key]
        if len(found) != 1:
            raise TlsSettingsError(f"{self}: {len(found)} private keys in it instead of one")
        return found[0]

    def _read(self) -> str:
        assert self.path is not None
        try:
            with open(self.path, "rb") as file:
                data = file.read(PEM_BYTES_MAX + 1)
        except OSError as error:
            raise TlsSettingsError(f"{self}: {error.strerror or 'cannot be read'}") from None
        except ValueError:
            raise TlsSettingsError(f"{self.setting}: not the path of a file") from None
        if len(data) > PEM_BYTES_MAX:
            raise TlsSettingsError(f"{self}: larger than {PEM_BYTES_MAX} bytes, so not PEM")
        if data.startswith(_JAVA_KEYSTORE):
            raise TlsSettingsError(f"{self}: a Java keystore. {conversion('JKS', self.path)}")
        if data.startswith(_SEQUENCE):
            raise TlsSettingsError(
                f"{self}: binary, not PEM. If it is PKCS12: {conversion('PKCS12', self.path)}"
            )
        return data.decode("utf-8", "replace")


def conversion(kind: str, path: str) -> str:
    """How to make a PEM file of a keystore."""
    stem = path.rpartition("/")[2].rpartition(".")[0] or "store"
    to_pem = f"openssl pkcs12 -in {path if kind == 'PKCS12' else stem + '.p12'} -out {stem}.pem"
    if kind == "PKCS12":
        return f"Convert it: {to_pem}"
    return (
        f"Convert it: keytool -importkeystore -srckeystore {path} -destkeystore {stem}.p12 "
        f"-deststoretype PKCS12 && {to_pem}"
    )


def decoded(block: Block) -> bytes:
    """A certificate in its binary form."""
    data = _decoded(block)
    assert data is not None, "checked when it was read"
    return data


def load_key(context: ssl.SSLContext, chain: list[Block], key: Block, password: str | None) -> None:
    """Use this certificate, the ones that vouch for it, and its key.

    Raises TlsSettingsError if OpenSSL cannot take the password; otherwise OSError, usually ssl.SSLError.
    """
    # Without a password OpenSSL would ask for one on the terminal.
    secret = _password_bytes(password or "")
    text = "".join(block.text for block in [key, *chain])
    with _private_file(text.encode()) as path:
        context.load_cert_chain(path, password=secret)


@contextmanager
def _private_file(data: bytes) -> Iterator[str]:
    """A path under which OpenSSL finds these bytes, and nobody else does."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("penstock-tls", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{descriptor}"
        temporary = None
    else:
        # Created with mode 0600.
        descriptor, path = tempfile.mkstemp(prefix="penstock-tls-")
        temporary = path
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield path
    finally:
        os.close(descriptor)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _password_bytes(password: str) -> bytes:
    try:
        secret = password.encode()
    except UnicodeEncodeError:
        raise TlsSettingsError("ssl.key.password: not UTF-8") from None
    if len(secret) > PASSWORD_BYTES_MAX:
        raise TlsSettingsError(f"ssl.key.password: longer than {PASSWORD_BYTES_MAX} bytes")
    return secret


def _wrapped(label: str, body: str) -> str:
    """The block as OpenSSL wants it. In a line of a properties file its newlines may have become spaces."""
    if ":" in body:
        lines = body.strip(
            "\r\n"
        )  # the headers of an old encrypted key; they have to be on lines of their own
    else:
        characters = "".join(body.split())
        lines = "\n".join(characters[start : start + 64] for start in range(0, len(characters), 64))
    return f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n"


def _decoded(block: Block) -> bytes | None:
    try:
        return base64.b64decode("".join(block.text.splitlines()[1:-1]), validate=True)
    except ValueError:
        # Not only binascii.Error: text that is not ASCII is another ValueError.
        return None
