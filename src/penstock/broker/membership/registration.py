"""The broker's registration on disk, from which its next process continues.

Two files in the first data directory, each replaced as a whole:

    penstock-registration   the broker epoch of the last registration, and the directories registered
    penstock-registering    the incarnation id and content of the last registration request

The previous broker epoch is a claim: a broker that names the epoch of its last registration says that it has lost
nothing since, and stays in sync. So it is withheld when a disk was replaced or the page cache was lost. Otherwise
the loss of a record that only this broker has confirmed would go unnoticed.

For the same reason a broker takes part only under an epoch that is stored here. If it confirmed records under an
epoch that a full disk could not store, its next process could only name an older epoch, and the controller would
treat it as a broker that has lost its data.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from penstock.broker.logs import Logger
from penstock.broker.storage.data_directory import NO_EPOCH, NO_ID, Directory
from penstock.broker.storage.storage import Storage
from penstock.model import format_id, parse_id

REGISTRATION = "penstock-registration"
REGISTERING = "penstock-registering"

# Exceptions of reading a damaged file.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


class Registration:
    def __init__(self, storage: Storage, logger: Logger) -> None:
        self._storage = storage
        self._files = storage.environment.files
        self._random = storage.environment.random
        self._logger = logger
        self._keeping = storage.directories[0].reserve.keeping
        self._path = os.path.join(storage.path, REGISTRATION)
        self._asked_path = os.path.join(storage.path, REGISTERING)
        # The broker epoch of the last registration if nothing was lost since; else -1.
        self.previous_broker_epoch = NO_EPOCH
        # Directories of the last registration that exist, or may come back.
        self._registered_ids: list[bytes] = []
        # The last write failed. That is logged once, not at every attempt.
        self._is_stuck = False
        self._recall()

    def _recall(self) -> None:
        """Find out whether this broker has lost data since it was last registered.

        A disk that cannot be read now has lost nothing: it may come back with everything that was confirmed. Until
        then no partition on it can lead, because the registration does not name it.
        """
        storage = self._storage
        epoch, known = storage.directories[0].stopped_epoch, []
        if self._files.exists(self._path):
            with suppress(*_DAMAGED):
                remembered = json.loads(self._files.read(self._path))
                epoch, known = int(remembered["brokerEpoch"]), list(map(parse_id, remembered["directories"]))
        self._registered_ids = [id for id in known if not storage.has_lost(id)]
        if len(self._registered_ids) == len(known) and not storage.lost_page_cache:
            self.previous_broker_epoch = epoch

    def incarnation_id(self, described: str) -> bytes | None:
        """The incarnation id to register with; ``described`` is the rest of the registration.

        None while it cannot be stored: try again later.

        If the previous process died before its registration was answered, this one does not know whether it was
        registered. The controller may have the registration and no longer know which epoch preceded it. With a new
        id it would have to treat this broker as one that has lost its data. So the id stays the same as long as
        nothing was lost and the rest is the same, and the controller repeats the response that was missed.
        """
        asked = {"version": 0, "after": self.previous_broker_epoch, "as": described}
        if self.previous_broker_epoch != NO_EPOCH and self._files.exists(self._asked_path):
            with suppress(*_DAMAGED):
                before = json.loads(self._files.read(self._asked_path))
                id = bytes.fromhex(before.pop("id"))
                if before == asked:
                    return id
        id = self._random.randbytes(16)
        # For the next process. Of no use after a power loss, so not durable.
        if not self._write(self._asked_path, {**asked, "id": id.hex()}, durable=False):
            return None
        return id

    def remember_epoch(self, epoch: int) -> bool:
        """Store the epoch of a new registration; all writes from now on belong to it.

        False while it cannot be stored. Until it is, this broker must confirm nothing.
        """
        directories = self._storage.directories
        ids = [directory.id for directory in directories if directory.id != NO_ID]
        remembered = {
            "version": 0,
            "brokerEpoch": epoch,
            # Including those that cannot be read now: if one is replaced, its data is lost.
            "directories": [format_id(id) for id in dict.fromkeys([*ids, *self._registered_ids])],
        }
        if not self._write(self._path, remembered, durable=True):
            return False
        # If this process has to register again, it has lost nothing in between.
        self.previous_broker_epoch = epoch
        self._storage.flushed_note.loss_told()
        for directory in directories:
            if directory.is_online and not directory.has_noted_boot:
                self._note_boot(directory)
        return True

    def _note_boot(self, directory: Directory) -> None:
        """The controller knows of this directory's loss, or the disk was too full to store the boot id at start."""
        try:
            directory.note_boot()
        except OSError as error:
            # The next start reports the loss once more, if it finds this disk.
            self._logger.error("cannot store the boot id", path=directory.path, error=str(error))
            self._storage.check_disk(directory, error)

    def _write(self, path: str, remembered: dict[str, object], *, durable: bool) -> bool:
        try:
            data = json.dumps(remembered).encode()
            self._keeping(lambda: self._files.replace(path, data, durable=durable))
        except OSError as error:
            if not self._is_stuck:
                self._is_stuck = True
                self._logger.error(
                    "this broker stays out of the cluster until its registration can be stored",
                    error=str(error),
                )
            self._storage.check_disk(self._storage.directories[0], error)
            return False
        self._is_stuck = False
        return True
