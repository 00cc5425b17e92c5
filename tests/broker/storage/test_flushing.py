"""The flushes of all partitions: which run, and which stand in line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.storage.flushing import FLUSHES_MAX
from tests.broker.disks import Node, hosted


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a")


def test_who_is_deleted_while_it_waits_for_a_flush_keeps_nobody_waiting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = node.start().flush_queue
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(
        node.spawn, "in_thread", lambda _, done, *, lane: ends.append(lambda: done(None, None))
    )
    for _ in range(FLUSHES_MAX):
        queue.start(lambda: None, lambda error: None)
    # The first ones are deleted meanwhile: asked to flush, they do nothing.
    waiting = [hosted(index) for index in range(2 * FLUSHES_MAX)]
    for one in waiting:
        assert not queue.may_start(one)  # type: ignore[arg-type]
    for end in ends:
        end()
    assert [one.flushes for one in waiting] == [1] * len(waiting)
