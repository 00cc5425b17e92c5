"""The checkers notice what they are there to notice: each truth is told a lie."""

from __future__ import annotations

import random

import pytest

from penstock.metadata.image import Image
from penstock.metadata.values import BrokerImage
from penstock.model import BrokerId
from penstock.protocol.records import encode_batch
from penstock.sim.checkers import EqualImages, LeasesEnd, OneController, OneHistory, RisingStarts
from penstock.sim.client import Place
from penstock.sim.client_checkers import ClientCheckers
from penstock.sim.cluster import Machine
from penstock.sim.disk import Disk, SimFiles
from penstock.sim.loop import Loop, Process, Streams
from penstock.sim.report import Violation

HERE = Place(b"1" * 16, "orders", 0)
THERE = Place(b"1" * 16, "orders", 1)


@pytest.fixture
def checkers() -> ClientCheckers:
    return ClientCheckers()


def send(
    checkers: ClientCheckers, *values: bytes, producer: str = "producer", is_promise: bool = True
) -> None:
    for number, value in enumerate(values):
        checkers.promises.sending(HERE, producer, number, value, is_promise=is_promise)


def read(checkers: ClientCheckers, offset: int, value: bytes, epoch: int = 0, by: str = "reader") -> None:
    checkers.values.saw(HERE, offset, value, epoch, by)
    checkers.promises.read(HERE, offset, value, by)


def test_what_happens_as_it_should_is_no_violation(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b")
    checkers.promises.acked(b"a", 0)
    read(checkers, 0, b"a")
    read(checkers, 0, b"a", by="another")
    checkers.promises.acked(b"b", 1)
    read(checkers, 1, b"b")
    checkers.promises.final({HERE: 2})


def test_an_offset_with_two_values(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b")
    read(checkers, 0, b"a")
    with pytest.raises(Violation, match="inconsistent offsets"):
        read(checkers, 0, b"b", by="another")


def test_an_offset_whose_epoch_changed(checkers: ClientCheckers) -> None:
    send(checkers, b"a")
    read(checkers, 0, b"a", epoch=1)
    with pytest.raises(Violation, match="inconsistent offsets"):
        read(checkers, 0, b"a", epoch=2)


def test_a_value_read_elsewhere_than_it_was_acknowledged(checkers: ClientCheckers) -> None:
    send(checkers, b"a")
    checkers.promises.acked(b"a", 7)
    with pytest.raises(Violation, match="acknowledged at 7"):
        read(checkers, 8, b"a")


def test_a_value_acknowledged_where_another_was_read(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b")
    read(checkers, 0, b"a")
    with pytest.raises(Violation, match="lost write"):
        checkers.promises.acked(b"b", 0)


def test_a_value_at_two_offsets(checkers: ClientCheckers) -> None:
    send(checkers, b"a")
    read(checkers, 0, b"a")
    with pytest.raises(Violation, match="duplicate"):
        read(checkers, 1, b"a")


def test_a_value_that_was_refused_and_read(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b")
    checkers.promises.failed(b"a")
    with pytest.raises(Violation, match="G1a"):
        read(checkers, 0, b"a")
    read(checkers, 1, b"b")
    with pytest.raises(Violation, match="G1a"):
        checkers.promises.failed(b"b")


def test_a_value_that_nobody_sent_or_sent_elsewhere(checkers: ClientCheckers) -> None:
    with pytest.raises(Violation, match="nobody sent"):
        read(checkers, 0, b"?")
    send(checkers, b"a")
    with pytest.raises(Violation, match="was sent to"):
        checkers.promises.read(THERE, 0, b"a", "reader")


def test_an_acknowledged_value_behind_the_end_or_never_read(checkers: ClientCheckers) -> None:
    send(checkers, b"a")
    checkers.promises.acked(b"a", 3)
    with pytest.raises(Violation, match="lost write"):
        checkers.promises.final({HERE: 3})
    with pytest.raises(Violation, match="unseen"):
        checkers.promises.final({HERE: 4})


def test_an_acknowledgement_of_the_leader_alone_promises_nothing(checkers: ClientCheckers) -> None:
    send(checkers, b"a", is_promise=False)
    checkers.promises.acked(b"a", 3)
    checkers.promises.final({HERE: 3})


def test_what_somebody_asked_to_delete_may_be_gone(checkers: ClientCheckers) -> None:
    send(checkers, b"a")
    checkers.promises.acked(b"a", 3)
    checkers.starts.asked(HERE, 4)
    checkers.promises.final({HERE: 4})


def test_values_of_one_producer_out_of_order(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b", b"c")
    read(checkers, 5, b"a")
    with pytest.raises(Violation, match="order"):
        read(checkers, 4, b"b")


def test_values_of_one_producer_out_of_order_that_are_not_neighbours(checkers: ClientCheckers) -> None:
    send(checkers, b"a", b"b", b"c")
    read(checkers, 5, b"a")
    read(checkers, 4, b"c")
    with pytest.raises(Violation, match="order"):
        checkers.promises.final({HERE: 6})


def test_a_poll_that_skips_or_goes_back(checkers: ClientCheckers) -> None:
    checkers.polls.polled_from(HERE, 3, 3, "reader")
    with pytest.raises(Violation, match="poll skip"):
        checkers.polls.polled_from(HERE, 4, 6, "reader")
    with pytest.raises(Violation, match="nonmonotonic poll"):
        checkers.polls.polled_from(HERE, 4, 3, "reader")
    checkers.starts.asked(HERE, 6)
    checkers.polls.polled_from(HERE, 4, 6, "reader")


def test_a_start_that_nobody_asked_for(checkers: ClientCheckers) -> None:
    checkers.starts.asked(HERE, 5)
    checkers.starts.saw(HERE, 5, "reader")
    with pytest.raises(Violation, match="starts at 6"):
        checkers.starts.saw(HERE, 6, "reader")


def test_a_start_that_falls_behind_what_was_deleted(checkers: ClientCheckers) -> None:
    checkers.starts.asked(HERE, 5)
    checkers.starts.saw(HERE, 0, "reader")
    checkers.starts.deleted(HERE, 5, epoch=3)
    checkers.starts.saw(HERE, 5, "reader", epoch=3)
    # Asked before the deletion was acknowledged, or of a leader from before it.
    checkers.starts.saw(HERE, 0, "reader", epoch=3, since=(0, 0))
    checkers.starts.saw(HERE, 0, "reader", epoch=2)
    with pytest.raises(Violation, match="everything before 5 was deleted"):
        checkers.starts.saw(HERE, 4, "reader", epoch=4)


def test_an_old_leader_that_goes_on_answering(checkers: ClientCheckers) -> None:
    leaders = checkers.leaders
    leaders.answered(HERE, 1, 1_000, 1_001, "one")
    leaders.answered(HERE, 2, 2_000, 2_001, "other")
    leaders.answered(HERE, 1, 8_000, 8_001, "one")
    leaders.answered(HERE, 2, 20_000, 20_001, "other")
    with pytest.raises(Violation, match="stale leader"):
        leaders.answered(HERE, 1, 9_000, 9_001, "one")


def test_a_time_that_is_looked_up_wrongly(checkers: ClientCheckers) -> None:
    checkers.values.times[HERE] = {0: 100, 1: 300, 2: 200, 3: 400}
    times = checkers.times
    assert [times.expected(HERE, at_ms) for at_ms in (50, 150, 301, 500)] == [0, 1, 3, -1]
    times.found(HERE, 150, 1, 1, "timekeeper")
    times.found(HERE, 500, -1, -1, "timekeeper")
    times.found(HERE, 500, -1, 7, "timekeeper")
    for offset in (-1, 2, 0):
        with pytest.raises(Violation, match="for the time 150"):
            times.found(HERE, 150, 1, offset, "timekeeper")
    checkers.starts.asked(HERE, 2)
    times.found(HERE, 150, 1, 2, "timekeeper")


def test_a_commit_for_a_topic_that_is_gone(checkers: ClientCheckers) -> None:
    commits, again = checkers.commits, HERE._replace(topic_id=b"2" * 16)
    commits.committing("group", HERE, -1, 10)
    commits.acked("group", HERE, -1, 10)
    # Sent, and acknowledged while the topic was being deleted: it may count for the next one.
    commits.committing("group", HERE, -1, 11)
    commits.acked("group", HERE, -1, 11, is_deleting=True)
    commits.fetched("group", again, -1, "member")
    commits.fetched("group", again, 11, "member")
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", again, 10, "member")


def test_a_commit_that_did_not_survive(checkers: ClientCheckers) -> None:
    commits = checkers.commits
    commits.fetched("group", HERE, -1, "member")
    commits.committing("group", HERE, 1, 10)
    commits.fetched("group", HERE, -1, "member")
    commits.fetched("group", HERE, 10, "member")
    commits.acked("group", HERE, 1, 10)
    commits.fetched("group", HERE, 10, "member")
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, -1, "member")


def test_a_commit_of_an_older_generation_has_no_effect_after_one_of_a_newer(checkers: ClientCheckers) -> None:
    commits = checkers.commits
    commits.committing("group", HERE, 1, 10)
    commits.committing("group", HERE, 2, 20)
    commits.acked("group", HERE, 2, 20)
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, 10, "member")


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_answer_that_comes_after_a_commit_of_a_newer_generation_changes_nothing(
    checkers: ClientCheckers, is_refused: bool
) -> None:
    commits = checkers.commits
    commits.committing("group", HERE, 1, 10)
    commits.committing("group", HERE, 2, 20)
    commits.acked("group", HERE, 2, 20)
    (commits.refused if is_refused else commits.acked)("group", HERE, 1, 10)
    commits.fetched("group", HERE, 20, "member")
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, 10, "member")


def test_a_commit_that_was_refused_has_no_effect(checkers: ClientCheckers) -> None:
    commits = checkers.commits
    commits.committing("group", HERE, 1, 10)
    commits.refused("group", HERE, 1, 10)
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, 10, "member")


def test_two_owners_in_one_generation(checkers: ClientCheckers) -> None:
    checkers.owners.owns("group", 1, HERE, "one")
    checkers.owners.owns("group", 2, HERE, "other")
    checkers.owners.owns("group", 1, THERE, "other")
    with pytest.raises(Violation, match="two owners"):
        checkers.owners.owns("group", 1, HERE, "other")


def test_two_controllers_in_one_epoch() -> None:
    controllers = OneController()
    controllers.saw(1, "node-1")
    controllers.saw(2, "node-2")
    with pytest.raises(Violation, match="two controllers"):
        controllers.saw(2, "node-1")


def test_metadata_histories_that_part() -> None:
    history, path = OneHistory(), "/disk1/__cluster_metadata-0/0.log"
    machines = []
    for number, value in ((1, b"a"), (2, b"a"), (3, b"b")):
        machine = Machine(number, Disk(random.Random(number)))
        files = SimFiles(machine.disk, Process(Loop(Streams(1)), machine.host))
        files.make_directory("/disk1/__cluster_metadata-0")
        content = files.create(path)
        for offset, each in ((0, b"first"), (1, value)):
            content.append(bytes(encode_batch([(0, None, each, ())], base_offset=offset)))
        machines.append(machine)
    history.saw(machines[0], [path], 1)
    history.saw(machines[0], [path], 2)
    history.saw(machines[1], [path], 2)
    assert history.compared == 2
    # What is not committed may differ.
    history.saw(machines[2], [path], 1)
    with pytest.raises(Violation, match="metadata histories part: at offset 1"):
        history.saw(machines[2], [path], 2)


def test_a_broker_that_serves_without_a_lease() -> None:
    leases = LeasesEnd()
    leases.serves(1, 7, 6_000, 20_000)
    with pytest.raises(Violation, match="without a lease"):
        leases.serves(1, 7, 7_000, 20_000)
    fenced = BrokerImage(BrokerId(1), 7, b"", (), None, True, False, ())
    leases.images_say(Image(offset=1, brokers={BrokerId(1): fenced}), 20_000)
    leases.images_say(Image(offset=2, brokers={BrokerId(1): fenced}), 25_000)
    leases.serves(1, 7, 0, 26_000)
    leases.serves(1, 8, 0, 27_000)
    with pytest.raises(Violation, match="fenced 7000 ms ago"):
        leases.serves(1, 7, 0, 27_000)
    # It was unfenced and fenced again between two looks.
    leases.is_inactive(1, 26_000)
    leases.serves(1, 7, 0, 27_000)
    with pytest.raises(Violation, match="fenced 7000 ms ago"):
        leases.serves(1, 7, 0, 33_000)


def test_a_broker_that_was_unfenced_between_two_looks_and_never_knew_of_the_first_fence() -> None:
    leases = LeasesEnd()
    fenced = BrokerImage(BrokerId(1), 7, b"", (), None, True, False, ())
    for now_ms in (20_000, 25_000):
        image = Image(offset=1, brokers={BrokerId(1): fenced})
        leases.saw(image, "node-2/1", now_ms)
        leases.images_say(image, now_ms)
    with pytest.raises(Violation, match="fenced 7000 ms ago"):
        leases.serves(1, 7, 0, 27_000)
    again = fenced._replace(fenced=False)._replace(fenced=True)
    leases.saw(Image(offset=3, brokers={BrokerId(1): again}), "node-2/1", 26_000)
    leases.serves(1, 7, 0, 27_000)
    with pytest.raises(Violation, match="fenced 7000 ms ago"):
        leases.serves(1, 7, 0, 33_000)


def test_the_start_of_a_leader_that_falls() -> None:
    starts, machine = RisingStarts(), Machine(1, Disk(random.Random(1)))
    starts.saw(machine, b"1", 0, 4, 10)
    starts.saw(machine, b"1", 0, 5, 0)
    with pytest.raises(Violation, match="began at 10 and now begins at 9"):
        starts.saw(machine, b"1", 0, 4, 9)


def test_images_that_differ_at_an_offset() -> None:
    images = EqualImages()
    images.saw(Image(offset=3, next_producer_id=1), "node-1")
    images.saw(Image(offset=3, next_producer_id=1), "node-2")
    images.saw(Image(offset=4, next_producer_id=2), "node-2")
    with pytest.raises(Violation, match="offset 4"):
        images.saw(Image(offset=4, next_producer_id=1), "node-1")


def test_late_offsets_of_a_classic_client_may_replace_later_ones(checkers: ClientCheckers) -> None:
    commits = checkers.commits
    for offset in (5, 9):
        commits.committing("group", HERE, 1, offset)
        commits.acked("group", HERE, 1, offset)
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, 5, "member")
    commits.may_come_late("group", HERE, 5)
    commits.fetched("group", HERE, 5, "member")
    assert commits.excused == 1
    with pytest.raises(Violation, match="lost commit"):
        commits.fetched("group", HERE, 7, "member")
