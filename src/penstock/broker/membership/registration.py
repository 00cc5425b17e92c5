"""What a broker remembers of its registration, so that the process after this one can go on from there.

Two files in the first data directory, each replaced as a whole:

    penstock-registration   the broker epoch of the last registration, and the directories there were
    penstock-registering    under which incarnation id this broker has asked to be registered, and as what

The previous broker epoch is a claim. A broker that names the epoch of its last registration says that it has lost
nothing since, and stays in sync. So it is withheld when a disk was replaced or the page cache was lost: a record
that only this broker has confirmed would be missed by nobody.

For the same reason a broker takes part only under an epoch that is written down here. If it confirmed records under
one that a full disk could not take, the process after it could only name an older epoch, and the controller would
take it for a broker that has lost its data.
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

# What comes of reading a file that is not as it was written.
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
        # Under which this broker was last registered, if it has lost nothing since; else -1.
        self.previous_broker_epoch = NO_EPOCH
        # Directories it was registered with that are there, or may be there again.
        self._registered_ids: list[bytes] = []
        # The last attempt to write something down failed. That is said once, not at every attempt.
        self._is_stuck = False
        self._recall()

    def _recall(self) -> None:
        """Find out whether this broker has lost anything of what it had when it was last registered.

        A disk that cannot be read now has lost nothing: it may come back with all that was confirmed. Until then
        nothing on it can lead, because the registration does not name it.
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
        """The id to register under; ``described`` is all else that the registration will say.

        None while it cannot be written down: ask again later.

        If the process before this one has asked and died before it was answered, nobody here knows whether it was
        registered. Under another id, a controller that has the registration, and no longer knows of which epoch
        it was the successor, would have to take this one for a broker that has lost its data. So it is the same
        id again, as long as nothing was lost and all else is the same, and the answer is the one that was missed.
        """
        asked = {"version": 0, "after": self.previous_broker_epoch, "as": described}
        if self.previous_broker_epoch != NO_EPOCH and self._files.exists(self._asked_path):
            with suppress(*_DAMAGED):
                before = json.loads(self._files.read(self._asked_path))
                id = bytes.fromhex(before.pop("id"))
                if before == asked:
                    return id
        id = self._random.randbytes(16)
        # For the next process, and of no use after a power loss.
        if not self._write(self._asked_path, {**asked, "id": id.hex()}, durable=False):
            return None
        return id

    def remember_epoch(self, epoch: int) -> bool:
        """This broker is registered: what it writes from now on belongs to this epoch.

        False while that cannot be written down. Until it is, this broker must confirm nothing.
        """
        directories = self._storage.directories
        ids = [directory.id for directory in directories if directory.id != NO_ID]
        remembered = {
            "version": 0,
            "brokerEpoch": epoch,
            # Also those that cannot be read now: should one be replaced, what was on it is lost.
            "directories": [format_id(id) for id in dict.fromkeys([*ids, *self._registered_ids])],
        }
        if not self._write(self._path, remembered, durable=True):
            return False
        # Should it have to register again, it has lost nothing in between.
        self.previous_broker_epoch = epoch
        self._storage.flushed_note.loss_told()
        for directory in directories:
            if directory.is_online and not directory.has_noted_boot:
                self._note_boot(directory)
        return True

    def _note_boot(self, directory: Directory) -> None:
        """What was lost in this directory is told, or its disk was too full at the start to take the note."""
        try:
            directory.note_boot()
        except OSError as error:
            # The next start will tell of it once more, if this disk is there at all.
            self._logger.error("cannot remember the boot", path=directory.path, error=str(error))
            self._storage.check_disk(directory, error)

    def _write(self, path: str, remembered: dict[str, object], *, durable: bool) -> bool:
        try:
            data = json.dumps(remembered).encode()
            self._keeping(lambda: self._files.replace(path, data, durable=durable))
        except OSError as error:
            if not self._is_stuck:
                self._is_stuck = True
                self._logger.error(
                    "this broker stays out of the cluster until its registration can be written down",
                    error=str(error),
                )
            self._storage.check_disk(self._storage.directories[0], error)
            return False
        self._is_stuck = False
        return True
