"""The metadata log and its snapshots, as a crash between two steps leaves them."""

from __future__ import annotations

import random

import pytest

from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.protocol.errors import ErrorCode
from penstock.raft.events import BeginEpochRequest, FetchAnswer, FetchRequest, Send
from penstock.raft.quorum import Voter
from penstock.raft.raft import Raft
from penstock.raft.settings import RaftSettings
from penstock.raft.storage import EpochEnd, SnapshotId, StoredState
from tests.log.making import append, flush, made_files, opened
from tests.support_files import fake_environment

VOTERS = tuple(Voter(id, bytes([id]) * 16) for id in (1, 2, 3))
# Epoch 1 up to here; what follows is of an epoch that committed nothing.
DIVERGES_AT = 8
KEPT = SnapshotId(5, 1)
FETCHED = SnapshotId(10, 5)


def killed_after_a_download(end_offset: int, *, epoch: int = 3, is_older_kept: bool = True) -> MetadataLog:
    """A log of which the snapshot that replaces it is durable, and which has not been replaced yet."""
    snapshots = [KEPT, FETCHED] if is_older_kept else [FETCHED]
    files = made_files()
    log = opened(files)
    for offset in range(end_offset):
        append(log, epoch=1 if offset < DIVERGES_AT else epoch)
    flush(log)
    log = opened(files, clean=False, log_start_offset=snapshots[0].end_offset)
    metadata = MetadataLog(fake_environment(files), log, VOTERS[0])
    metadata.begin_at(snapshots, VOTERS)
    return metadata


@pytest.mark.parametrize("is_older_kept", [True, False])
@pytest.mark.parametrize("end_offset", [7, 8, 9, 10, 11, 15])
def test_a_log_that_a_fetched_snapshot_replaces_is_not_taken_for_its_continuation(
    end_offset: int, is_older_kept: bool
) -> None:
    metadata = killed_after_a_download(end_offset, is_older_kept=is_older_kept)
    assert (metadata.start_offset, metadata.end_offset, metadata.last_epoch) == (10, 10, 5)
    raft = Raft(
        VOTERS[0],
        (1, 2, 3),
        log=metadata,
        stored=StoredState(5),
        random=random.Random(1),
        settings=RaftSettings(),
    )
    raft.start(0)
    effects = raft.request(BeginEpochRequest(6, 2, VOTERS[0]), "t", 0)
    (fetch,) = [
        effect.request
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.request, FetchRequest)
    ]
    # The leader has epoch 1 up to where ours parted from it, then epoch 5.
    is_known = fetch.last_epoch in (1, 5)
    raft.answered(
        fetch,
        FetchAnswer(ErrorCode.NONE, 6, 2, 12, diverging=None if is_known else EpochEnd(1, DIVERGES_AT)),
        1,
    )
    raft.check()


@pytest.mark.parametrize("end_offset", [10, 11, 15])
def test_a_log_that_continues_its_newest_snapshot_is_kept(end_offset: int) -> None:
    metadata = killed_after_a_download(end_offset, epoch=FETCHED.epoch)
    assert (metadata.start_offset, metadata.end_offset) == (KEPT.end_offset, end_offset)
    assert metadata.last_epoch == FETCHED.epoch
