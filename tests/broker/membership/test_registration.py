"""What a broker remembers of its registration: when it has lost nothing, and under which id it asks again."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.membership.registration import Registration
from tests.broker.disks import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "a", "b", "c")


def remembered(node: Node, **options: Any) -> Registration:
    """As a process that starts finds it."""
    return Registration(node.start(**options), node.logger)  # type: ignore[arg-type]


def test_the_broker_epoch_is_known_as_long_as_nothing_was_lost(node: Node) -> None:
    first = remembered(node)
    assert first.previous_broker_epoch == -1
    first.remember_epoch(41)
    # Killed: everything is still in the page cache.
    storage = node.start()
    killed = Registration(storage, node.logger)  # type: ignore[arg-type]
    assert killed.previous_broker_epoch == 41
    killed.remember_epoch(42)
    storage.leave_clean_marker(42)
    # A clean stop has it all on the disk, whatever the machine does then.
    assert remembered(node, boot_id=b"boot 2").previous_broker_epoch == 42


def test_a_registration_whose_answer_was_missed_is_asked_for_again(node: Node) -> None:
    """Else a controller that is new too would take the broker for one that has lost its data."""
    first = remembered(node)
    first.remember_epoch(5)
    asked = first.incarnation_id("as this")
    assert remembered(node).incarnation_id("as this") == asked
    answered = remembered(node)
    assert answered.incarnation_id("as this") == asked
    answered.remember_epoch(8)
    after = remembered(node)
    assert after.previous_broker_epoch == 8
    assert after.incarnation_id("as this") != asked


@pytest.mark.parametrize("case", ["power lost", "disk replaced", "other address", "damaged", "not ours"])
def test_a_broker_that_is_not_as_it_was_registers_as_another(node: Node, case: str) -> None:
    first = remembered(node)
    first.remember_epoch(5)
    asked = first.incarnation_id("as this")
    file = Path(node.paths[0], "penstock-registering")
    if case == "disk replaced":
        shutil.rmtree(node.paths[1])
    elif case == "damaged":
        file.write_bytes(file.read_bytes()[:-5])
    elif case == "not ours":
        file.write_bytes(b"5")
    again = remembered(node, boot_id=b"boot 2" if case == "power lost" else b"boot 1")
    assert again.incarnation_id("as that" if case == "other address" else "as this") != asked


def test_a_broker_does_not_ask_for_what_a_full_disk_would_let_it_forget(node: Node) -> None:
    """What it confirms under an epoch that it cannot name later would count as lost."""
    remembered(node).remember_epoch(5)
    first = remembered(node)
    node.files.failures = [("replace", node.paths[0], errno.ENOSPC)]
    assert first.incarnation_id("as this") is None
    assert first.incarnation_id("as this") is None
    assert len([line for line in node.logger.lines if "stays out" in line]) == 1, "said once"
    assert not node.failures, "a full disk has not failed"
    node.files.failures = []
    assert first.incarnation_id("as this") is not None


def test_an_epoch_that_a_full_disk_could_not_take_is_asked_for_again_by_the_next_process(node: Node) -> None:
    remembered(node).remember_epoch(5)
    first = remembered(node)
    asked = first.incarnation_id("as this")
    node.files.failures = [("replace", f"{node.paths[0]}/penstock-registration", errno.ENOSPC)]
    assert not first.remember_epoch(8)
    assert first.previous_broker_epoch == 5, "what it says of itself, should it ask again"
    killed = remembered(node)
    assert (killed.previous_broker_epoch, killed.incarnation_id("as this")) == (5, asked)
    assert killed.remember_epoch(8)
    assert remembered(node).previous_broker_epoch == 8


def test_a_boot_that_a_full_disk_could_not_take_is_noted_with_the_registration(node: Node) -> None:
    """Killed before the note, the broker would be taken for one whose machine went down."""
    first = node.start()
    Registration(first, node.logger).remember_epoch(5)  # type: ignore[arg-type]
    first.leave_clean_marker(5)
    storage = node.start(
        boot_id=b"boot 2", failures=[("replace", f"{path}/.boot-id", errno.ENOSPC) for path in node.paths]
    )
    again = Registration(storage, node.logger)  # type: ignore[arg-type]
    node.files.failures = []
    assert again.remember_epoch(6)
    assert remembered(node, boot_id=b"boot 2").previous_broker_epoch == 6


def test_a_second_disk_that_takes_no_note_of_a_power_failure_fails_alone(node: Node) -> None:
    remembered(node).remember_epoch(5)
    storage = node.start(boot_id=b"boot 2", failures=[("replace", node.paths[1], errno.EIO)])
    Registration(storage, node.logger).remember_epoch(6)  # type: ignore[arg-type]
    assert node.failures == [], "the node goes on"
    assert node.failed == [storage.directories[1]]
    assert [directory.is_online for directory in storage.directories] == [True, False, True]
    assert remembered(node, boot_id=b"boot 2").previous_broker_epoch == -1, "its page cache is lost"


def test_the_broker_epoch_is_not_claimed_after_a_power_failure(node: Node) -> None:
    first = remembered(node)
    first.remember_epoch(41)
    assert remembered(node, boot_id=b"boot 2").previous_broker_epoch == -1


def test_the_broker_epoch_is_not_claimed_when_one_directory_lost_its_page_cache(node: Node) -> None:
    first = remembered(node)
    first.remember_epoch(41)
    for path in (node.paths[0], node.paths[2]):
        Path(path, ".kafka_cleanshutdown").write_text('{"brokerEpoch": 41}')
    storage = node.start(boot_id=b"boot 2")
    assert [directory.lost_page_cache for directory in storage.directories] == [False, True, False]
    assert storage.lost_page_cache
    after = Registration(storage, node.logger)  # type: ignore[arg-type]
    assert after.previous_broker_epoch == -1


def test_the_broker_epoch_is_not_claimed_when_a_disk_was_replaced(node: Node) -> None:
    first = remembered(node)
    first.remember_epoch(41)
    node.paths.append(str(node.root / "d"))
    assert remembered(node).previous_broker_epoch == 41, "one more has lost nothing"
    shutil.rmtree(node.paths[2])
    assert remembered(node).previous_broker_epoch == -1


def test_a_disk_that_cannot_be_read_has_lost_nothing_until_another_is_in_its_place(node: Node) -> None:
    """What lies there may be all that is left of a committed record: the controller must go on counting on it."""
    remembered(node).remember_epoch(41)
    broken = [("make", node.paths[1], errno.EIO)]
    without = remembered(node, failures=broken)
    assert without.previous_broker_epoch == 41
    without.remember_epoch(42)
    assert remembered(node, failures=broken).previous_broker_epoch == 42
    assert remembered(node).previous_broker_epoch == 42, "it is back"
    shutil.rmtree(node.paths[1])
    replaced = remembered(node)
    assert replaced.previous_broker_epoch == -1
    replaced.remember_epoch(43)
    assert remembered(node).previous_broker_epoch == 43, "said once"


@pytest.mark.parametrize("found", [b"", b"{", b"5", b'{"brokerEpoch": 41, "directories": [5]}'])
def test_a_damaged_registration_claims_nothing(node: Node, found: bytes) -> None:
    remembered(node).remember_epoch(41)
    Path(node.paths[0], "penstock-registration").write_bytes(found)
    assert remembered(node).previous_broker_epoch == -1
