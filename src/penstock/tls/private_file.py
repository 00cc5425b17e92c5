"""A small file that nobody else on this machine may read, such as one with a secret. As ssh has it with keys."""

from __future__ import annotations

import os
import stat

from penstock.tls.pem import FileVersion, TlsSettingsError

FILE_BYTES_MAX = 4096


class PrivateFile:
    def __init__(self, setting: str, path: str) -> None:
        self._setting = setting
        self.path = path

    def __str__(self) -> str:
        return f"{self._setting} {self.path}"

    def version(self) -> FileVersion | None:
        """None while the file is missing."""
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return FileVersion(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    def read(self) -> bytes:
        """Raises TlsSettingsError."""
        try:
            with open(self.path, "rb") as file:
                # Of the open file: another one may be put in its place meanwhile.
                status = os.fstat(file.fileno())
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise TlsSettingsError(f"{self}: {error.strerror or 'cannot be read'}") from None
        except ValueError:
            raise TlsSettingsError(f"{self._setting}: not the path of a file") from None
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TlsSettingsError(f"{self}: others on this machine may use it; chmod 600 {self.path}")
        if status.st_uid not in (os.geteuid(), 0):
            raise TlsSettingsError(f"{self}: the file belongs to another user")
        if len(data) > FILE_BYTES_MAX:
            raise TlsSettingsError(f"{self}: larger than {FILE_BYTES_MAX} bytes")
        return data
