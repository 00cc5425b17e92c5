"""The first users of a cluster, as far as this node knows any: from a file in its data directory or a variable.

If this node founds the cluster, they are in its first batch. If another node did, or if the cluster is older than
this start, they are ignored with a warning. The file is removed then: it is of no more use.
"""

from __future__ import annotations

import os

from penstock.broker.logs import Logger
from penstock.broker.options import ServeError
from penstock.environment import Environment
from penstock.metadata import first_users
from penstock.metadata.changes import METADATA_VERSION
from penstock.metadata.first_users import FILE_BYTES_MAX, FILE_NAME, MECHANISM, VARIABLE
from penstock.metadata.image import Image
from penstock.metadata.security import ScramCredential, ScramMechanism
from penstock.sasl import SaslError


class FirstUsers:
    def __init__(
        self, environment: Environment, directory: str, admin: tuple[str, str] | None, logger: Logger
    ) -> None:
        """``admin`` is the user and password of the variable. Raises ServeError if the file is damaged."""
        self._files = environment.files
        self._random = environment.random
        self._path = os.path.join(directory, FILE_NAME)
        self._admin = admin
        self._logger = logger
        self._in_file = self._read()
        # What this process founded a cluster with.
        self._written: dict[tuple[str, ScramMechanism], ScramCredential] | None = None
        # Until a cluster is known to exist.
        self._is_open = bool(self._in_file) or admin is not None

    def for_new_cluster(self) -> dict[tuple[str, ScramMechanism], ScramCredential]:
        """Their credentials; those of the variable win over those of the file."""
        found = dict(self._in_file)
        if self._admin is not None:
            user, password = self._admin
            found[user, MECHANISM] = first_users.credential(MECHANISM, password, self._random.randbytes)
        self._written = found
        return found

    def committed(self, image: Image) -> None:
        """The metadata is known up to here."""
        if not self._is_open or METADATA_VERSION not in image.features:
            return
        self._is_open = False
        admins = () if self._admin is None else ((self._admin[0], MECHANISM),)
        self._admin = None
        for key in dict.fromkeys((*self._in_file, *admins)):
            mine = None if self._written is None else self._written.get(key)
            known = image.security.credentials.get(key)
            # The file may have been copied to all controllers, and one of the others founded the cluster.
            if known is None or known not in (mine, self._in_file.get(key)):
                self._logger.warning(
                    f"the cluster exists already: the first user of {VARIABLE} or of {FILE_NAME} is ignored; "
                    "change users with `penstock users`, and remove the variable",
                    user=key[0],
                )
            elif mine is not None:
                self._logger.info("the cluster begins with a user", user=key[0], mechanism=key[1].sasl_name)
        if self._in_file:
            try:
                self._files.remove(self._path)
            except OSError as error:
                self._logger.warning("could not remove a file", path=self._path, error=str(error))

    def _read(self) -> dict[tuple[str, ScramMechanism], ScramCredential]:
        if not self._files.exists(self._path):
            return {}
        try:
            if self._files.size(self._path) > FILE_BYTES_MAX:
                raise ValueError("too large")
            return first_users.decode(self._files.read(self._path))
        except ValueError:
            # Not what is wrong with it, which might be a part of it.
            raise ServeError(
                f"{self._path} is damaged; write it again with `penstock users bootstrap`, or remove it"
            ) from None


def check_admin(text: str | None) -> tuple[str, str] | None:
    """User and password of the variable. Raises ServeError."""
    if not text:
        return None
    try:
        user, password = first_users.parse_variable(text)
        password.encode()
    except (ValueError, SaslError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise ServeError(f"{VARIABLE}: {why}") from None
    return user, password
