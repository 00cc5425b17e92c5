"""Report the progress of a running Spark job, for a progress bar.

A job function takes ``progress``: a function of (records done, records in total), called from time to time, also
from another thread. Spark reports finished tasks, not records, so the share of finished tasks stands for the
share of records; jobs split their ranges small enough for that.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

Progress: TypeAlias = Callable[[int, int], None]

POLL_S = 0.2


@contextmanager
def followed(spark: SparkSession, description: str, total: int, progress: Progress | None) -> Iterator[None]:
    """Report the progress of the Spark jobs started inside, out of ``total`` records."""
    if progress is None:
        yield
        return
    context = spark.sparkContext
    group = f"penstock-{uuid.uuid4().hex}"
    context.setJobGroup(group, description, interruptOnCancel=True)
    tracker = context.statusTracker()
    ended = threading.Event()

    def follow() -> None:
        done = 0
        while not ended.wait(POLL_S):
            # Never go back: when one stage ends, Spark reports the next, with more tasks to do.
            done = max(done, int(_share_done(tracker, group) * total))
            progress(done, total)

    progress(0, total)
    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # Otherwise the caller's later jobs would be counted and cancelled with ours.
        context.setLocalProperty("spark.jobGroup.id", "")
    # Last: the thread may have been in the middle of a report when the jobs ended.
    progress(total, total)


def _share_done(tracker: StatusTracker, group: str) -> float:
    """The share of finished tasks in all stages that Spark has reported."""
    done = tasks = 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            state = tracker.getStageInfo(stage)
            if state is not None:
                done += state.numCompletedTasks
                tasks += state.numTasks
    return done / tasks if tasks else 0.0
