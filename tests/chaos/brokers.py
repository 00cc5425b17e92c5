"""A broker for chaos tests: it can also be killed before it is ready, and run from another entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import BrokerProcess

# Small segments and dense indexes: every few hundred records another file begins, another name appears.
ROLLING = {
    "log.segment.bytes": "32768",
    "log.index.interval.bytes": "256",
    "log.segment.delete.delay.ms": "200",
    "log.flush.offset.checkpoint.interval.ms": "700",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "3",
    "offsets.topic.segment.bytes": "32768",
}


class ChaosBroker(BrokerProcess):
    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        data_dir: Path | None = None,
        entry: Sequence[str] = ("-m", "penstock"),
    ) -> None:
        super().__init__(settings, data_dir=data_dir)
        self._entry = list(entry)
        self.kills = 0

    def command(self) -> list[str]:
        _, _, _, *arguments = super().command()
        return [sys.executable, *self._entry, *arguments]

    def kill(self) -> None:
        super().kill()
        self.kills += 1

    def start_and_kill(self, after_s: float) -> None:
        """Begin to start, and be killed on the way, wherever that is: in the imports or in recovery."""
        assert not self.is_running
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                self.command(), stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
            try:
                time.sleep(after_s)
            finally:
                process.kill()
                process.wait()
        self.kills += 1


def completed_segments(data_dir: Path) -> int:
    """How often a log has rolled, judging by what is there. Directories may go away meanwhile."""
    segments = [sum(name.endswith(".log") for name in names) for _, _, names in os.walk(data_dir)]
    return sum(count - 1 for count in segments if count)
