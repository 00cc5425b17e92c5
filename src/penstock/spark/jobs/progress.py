"""How far a running Spark job is, told to whoever draws the bar.

A job function takes ``progress``: a function of (records done, records in all), called from time to time, also from
another thread. Spark says how many tasks have ended, not how many records they have read, so the share of ended
tasks stands for the share of records; jobs cut their ranges small enough for that to move.
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
    """Tell ``progress`` how far the Spark jobs started inside are with their ``total`` records."""
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
            # Never back: when one stage ends Spark tells of the next, with more tasks to do.
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
        # Or jobs of the caller's would be counted, and cancelled, with ours.
        context.setLocalProperty("spark.jobGroup.id", "")
    # The last word: whoever follows may have been in the middle of one when the jobs ended.
    progress(total, total)


def _share_done(tracker: StatusTracker, group: str) -> float:
    """Of the tasks of all stages that Spark has told of."""
    done = tasks = 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            state = tracker.getStageInfo(stage)
            if state is not None:
                done += state.numCompletedTasks
                tasks += state.numTasks
    return done / tasks if tasks else 0.0
