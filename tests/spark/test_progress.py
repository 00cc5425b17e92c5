"""What is told of a running Spark job: how far it is, never back, and at last that all is done."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.spark.jobs import progress
from penstock.spark.jobs.progress import followed

PATIENCE_S = 60


class Watched:
    """A Spark session with one job of two tasks, the first of which has ended."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self.may_answer = threading.Event()
        self.sparkContext = self
        self.properties: dict[str, str] = {}

    def setJobGroup(self, group: str, description: str, interruptOnCancel: bool) -> None:
        self.properties["spark.jobGroup.id"] = group

    def setLocalProperty(self, name: str, value: str) -> None:
        self.properties[name] = value

    def statusTracker(self) -> Watched:
        return self

    def getJobIdsForGroup(self, group: str) -> list[int]:
        assert group == self.properties["spark.jobGroup.id"]
        return [1]

    def getJobInfo(self, job: int) -> Any:
        return SimpleNamespace(stageIds=[1])

    def getStageInfo(self, stage: int) -> Any:
        self.was_asked.set()
        self.may_answer.wait(0.5)
        return SimpleNamespace(numCompletedTasks=1, numTasks=2)


def test_an_answer_that_comes_when_the_job_has_ended_does_not_take_the_bar_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "POLL_S", 0.001)
    spark: Any = Watched()
    told: list[int] = []

    def tell(done: int, total: int) -> None:
        assert total == 10
        told.append(done)
        if done == total:
            spark.may_answer.set()

    with followed(spark, "a job", 10, tell):
        assert spark.was_asked.wait(PATIENCE_S)

    assert told == sorted(told)
    assert set(told) == {0, 5, 10}
    assert spark.properties["spark.jobGroup.id"] == "", "later jobs would be counted with this one"
