"""The file of profiles: for each cluster a table with its brokers and how to connect, under librdkafka's names.

    [prod]
    bootstrap.servers = "broker1.example.com:9093,broker2.example.com:9093"
    security.protocol = "ssl"
    ssl.ca.location = "prod-ca.pem"

TOML makes nested tables of names with dots, unless they are in quotes; both are read. Paths are relative to the
file, because commands run anywhere. Errors never show values.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli.connection import FILE_BYTES_MAX, ClientSettings, check_setting, plain_value
from penstock.cli.failures import WrongUsage, near_name
from penstock.tls.settings import SECRET_NAMES
from penstock.wire.errors import BadSecurity

VARIABLE = "PENSTOCK_PROFILES"
_LOCATION = ".location"
_SECRET_PARTS = ("password", "secret", "token", "jaas", "oauthbearer.config")


@dataclass(frozen=True, slots=True)
class Profiles:
    file: Path
    # As TOML has them.
    profiles: Mapping[str, Mapping[str, Any]] = field(repr=False)

    def settings(self, name: str) -> ClientSettings:
        """One profile, its names checked. Raises WrongUsage."""
        if name not in self.profiles:
            near = near_name(name, self.profiles)
            hint = f", did you mean {near}?" if near else "; see `penstock profiles list`"
            raise WrongUsage(f"no profile {name} in {self.file}{hint}")
        source = f"profile {name} in {self.file}"
        values: dict[str, str] = {}
        for setting, value in _flat(self.profiles[name]):
            try:
                check_setting(setting)
            except BadSecurity as error:
                raise WrongUsage(f"{source}: {error}") from None
            if not isinstance(value, str | int):
                raise WrongUsage(f"{source}: {setting} is not a text")
            if setting in values:
                raise WrongUsage(f"{source}: {setting} is there twice, with quotes and without")
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if setting.endswith(_LOCATION) and text:
                text = str(self.file.parent / Path(text).expanduser())
            values[setting] = plain_value(setting, text)
        return ClientSettings(source, values)


def is_secret(setting: str) -> bool:
    return setting in SECRET_NAMES or any(part in setting for part in _SECRET_PARTS)


def profiles_path(environment: Mapping[str, str] = os.environ) -> Path:
    if given := environment.get(VARIABLE):
        return Path(given).expanduser().absolute()
    # A relative path is to be ignored, says the XDG specification.
    home = Path(environment.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path("~/.config").expanduser()) / "penstock" / "profiles.toml"


def read_profiles() -> Profiles:
    """All profiles; none if there is no file. Warns of secrets that others can read. Raises WrongUsage."""
    path = profiles_path()
    try:
        with open(path, "rb") as file:
            content = tomllib.loads(file.read(FILE_BYTES_MAX).decode())
            is_exposed = bool(os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except FileNotFoundError:
        return Profiles(path, {})
    except OSError as error:
        raise WrongUsage(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = f": {error}" if isinstance(error, tomllib.TOMLDecodeError) else ""
        raise WrongUsage(f"{path} is not a TOML file{where}") from None
    for name, value in content.items():
        if not isinstance(value, dict) or any(_is_setting(each) for each, _ in _flat(value, f"{name}.")):
            raise WrongUsage(
                f"{path}: {name} is outside of a profile; begin one with a line such as [prod] before it"
            )
    if is_exposed and any(is_secret(name) for value in content.values() for name, _ in _flat(value)):
        print(
            f"penstock: warning: others on this machine may read the secrets in {path}; chmod 600 {path}",
            file=sys.stderr,
        )
    return Profiles(path, content)


def load_profile(name: str) -> ClientSettings:
    """Raises WrongUsage."""
    found = read_profiles()
    if not found.profiles:
        raise WrongUsage(
            f"no profile {name}: {found.file} has none; write it, or choose the file with {VARIABLE}"
        )
    return found.settings(name)


def _is_setting(name: str) -> bool:
    try:
        check_setting(name)
    except BadSecurity:
        return False
    return True


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
