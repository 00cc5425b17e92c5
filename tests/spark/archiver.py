"""An archive in a process of its own, for `test_archive_kills.py` to kill: `python -m tests.spark.archiver ...`.

It goes on until it is killed, or with ``--once`` to the end. With ``--die-after N`` the driver kills itself with
SIGKILL after N steps on the disk, so that every step of a commit can be its last.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from penstock.spark import session
from penstock.spark.jobs import archive
from penstock.spark.jobs.tables.disk import Disk


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("topic")
    parser.add_argument("location")
    parser.add_argument("scratch")
    parser.add_argument("--format", default="parquet")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--log-level", default="OFF")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--die-after", type=int)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # says where it hangs
    java_options = f"-XX:TieredStopAtLevel=1 -Djava.io.tmpdir={given.scratch}"
    spark = session(
        "archiver",
        given.master,
        **{
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": java_options,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": java_options,
            "spark.local.dir": given.scratch,
            "spark.sql.warehouse.dir": f"{given.scratch}/warehouse",
        },
    )
    spark.sparkContext.setLogLevel(given.log_level)
    if given.die_after is not None:
        die_after(given.die_after)
    archive(
        spark,
        given.bootstrap,
        given.topic,
        given.location,
        format=given.format,
        # Small files and batches: many commits, and merges among them.
        file_mb=1,
        every_seconds=None if given.once else 0.05,
    )
    spark.stop()


def die_after(steps: int) -> None:
    """The driver alone: tasks are other processes, and fork from one that was not told."""
    taken = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal taken
            result = step(*arguments)
            taken += 1
            if taken >= steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("create", "sync", "link", "unlink", "make_directory", "rename"):
        setattr(Disk, name, counted(getattr(Disk, name)))


if __name__ == "__main__":
    main()
