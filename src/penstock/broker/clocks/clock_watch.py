"""The shell around ``Timekeeper``: reads the clocks, passes on heartbeat responses, logs when the time is in doubt.

A file in the first data directory, ``penstock-clock``, keeps the last believed time and the jumps that are not
believed yet, so that the next process notices a different time at its start and continues to wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress

from penstock.broker.clocks.timekeeper import Doubt, Memory, NodeTime, Reading, Timekeeper
from penstock.broker.logs import Logger
from penstock.broker.storage.data_directory import CHECKPOINT
from penstock.environment import Environment
from penstock.protocol.messages import TIME_UNKNOWN
from penstock.protocol.messages.brokers import BrokerHeartbeatResponse

CLOCK = "penstock-clock"
# Between the readings of the two clocks. If it took longer, this process was paused in between.
READING_MS_MAX = 100
READING_TRIES = 10
# How long a doubt must last before it is logged: more than one heartbeat, or until a new controller has heard from
# every broker.
LASTING_MS = 3_000
SAY_AFTER_MS = {Doubt.NOT_TOLD: 30_000, Doubt.NOT_COMPARED: 30_000}
# How often a lasting doubt is logged again.
REPEAT_MS = 3_600_000


class ClockWatch:
    def __init__(self, environment: Environment, path: str, node_id: int, logger: Logger) -> None:
        self._clock = environment.clock
        self._files = environment.files
        self._path = os.path.join(path, CLOCK)
        self._logger = logger
        self._keeper = Timekeeper(
            node_id, self.read(), self._recall(os.path.join(path, CHECKPOINT)), environment.clock.boot_id()
        )
        # Whether this process has written the file.
        self._has_remembered = False
        # The doubt at the last heartbeat, and when it began.
        self._doubt: Doubt | None = None
        self._doubt_ms = 0
        # The doubt that was logged last, and when.
        self._said: Doubt | None = None
        self._said_ms = 0

    def read(self) -> Reading:
        """Both clocks, at the same moment."""
        clock = self._clock
        for _ in range(READING_TRIES):
            now_ms = clock.now_ms()
            reading = Reading(now_ms, clock.wall_ms())
            if clock.now_ms() - now_ms <= READING_MS_MAX:
                break
        return reading

    def heard(self, sent: Reading, response: BrokerHeartbeatResponse) -> None:
        """The controller has answered the heartbeat that was sent at ``sent``."""
        received = self.read()
        controller_ms = response.controller_time_ms
        self._keeper.compared(
            sent,
            received,
            None if controller_ms == TIME_UNKNOWN else controller_ms,
            {
                each.node_id: NodeTime(
                    None if each.ahead_ms == TIME_UNKNOWN else each.ahead_ms,
                    None if each.steady_ms == TIME_UNKNOWN else each.steady_ms,
                )
                for each in response.clocks
            },
        )
        self._say(received)
        if not self._has_remembered:
            # Once per process, soon after its start.
            self.prepare_memory()()

    def expiry_ms(self) -> int | None:
        """The current time for deleting by age; None while nothing may be deleted by age."""
        return self._keeper.expiry_ms(self.read())

    def doubt(self) -> Doubt | None:
        """Why the time is in doubt; None when it is not."""
        return self._keeper.doubt(self.read())

    def range_ms(self) -> tuple[int, int]:
        """The earliest and the latest time that it may be now."""
        return self._keeper.range_ms(self.read())

    def stamp_ms(self) -> int:
        """The timestamp to write on stored records."""
        return self._keeper.stamp_ms(self.read())

    def steady_ms(self, reading: Reading) -> int:
        """How long ago this broker's own clock last jumped."""
        return self._keeper.steady_ms(reading)

    def ahead_ms(self) -> dict[int, int | None]:
        """How far each broker's clock is ahead of the median; None where unknown."""
        return self._keeper.ahead_ms(self.read())

    def prepare_memory(self) -> Callable[[], None]:
        """Return the work of storing the time for the next process, for a worker thread."""
        self._has_remembered = True
        memory = self._keeper.memory(self.read())
        text = json.dumps(
            {
                "version": 0,
                "believedMs": memory.believed_ms,
                "jumps": memory.jumps,
                "nowMs": memory.reading.now_ms,
                "wallMs": memory.reading.wall_ms,
                "steadyMs": memory.steady_ms,
                "boot": memory.boot,
            }
        )

        def write() -> None:
            # On a full disk the next process finds an older file and waits a little longer.
            with suppress(OSError):
                self._files.replace(self._path, text.encode(), durable=False)

        return write

    def check(self) -> None:
        self._keeper.check()

    def _recall(self, checkpoint: str) -> Memory | None:
        """What the last process stored. Older versions stored less, or only wrote their checkpoint."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(self._files.read(self._path))
            if "boot" not in noted:
                return Memory(int(noted["believedMs"]))
            return Memory(
                int(noted["believedMs"]),
                tuple((int(by_ms), int(lasted_ms)) for by_ms, lasted_ms in noted["jumps"]),
                Reading(int(noted["nowMs"]), int(noted["wallMs"])),
                int(noted["steadyMs"]),
                str(noted["boot"]),
            )
        with suppress(OSError):
            return Memory(self._files.modified_ms(checkpoint))
        return None

    def _say(self, reading: Reading) -> None:
        """Log a doubt once it lasts. A single late response is not logged, nor are a controller's first moments."""
        doubt, now_ms = self._keeper.doubt(reading), reading.now_ms
        if doubt is not self._doubt:
            self._doubt, self._doubt_ms = doubt, now_ms
        if doubt is None:
            if self._said is not None:
                self._logger.info("the time is no longer in doubt: deleting by age as usual")
            self._said = None
        elif now_ms - self._doubt_ms >= SAY_AFTER_MS.get(doubt, LASTING_MS) and (
            doubt is not self._said or now_ms - self._said_ms >= REPEAT_MS
        ):
            self._said, self._said_ms = doubt, now_ms
            if doubt is Doubt.JUMPED:
                what, by_ms = "less is deleted by age: check the clock", self._keeper.jump_ms()
            else:
                what, by_ms = (
                    "nothing is deleted by age: check the clock",
                    self._keeper.difference_ms(reading),
                )
            self._logger.warning(what, reason=doubt.value, by=difference_text(by_ms))


def difference_text(ahead_ms: int) -> str:
    """For example ``+10 days, 0:00:03`` or ``-0:00:20``."""
    days, seconds = divmod(round(abs(ahead_ms) / 1000), 86_400)
    text = f"{days} day{'s' if days > 1 else ''}, " if days else ""
    minutes = seconds // 60
    return f"{'-' if ahead_ms < 0 else '+'}{text}{minutes // 60}:{minutes % 60:02}:{seconds % 60:02}"
