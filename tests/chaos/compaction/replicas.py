"""The replicas of compacted partitions: their files, how far they are cleaned, and having each of them lead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.log.cleaning_state import CleaningState, read_state
from penstock.machine import MachineFiles
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.placement import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ReassignablePartition,
    ReassignableTopic,
    TopicPartitions,
)
from penstock.protocol.records import batches, crc_matches, decode_records
from tests.chaos.compaction.model import Entry
from tests.chaos.ledger import Place
from tests.cluster.cluster import Cluster, Node
from tests.cluster.wire import Wire
from tests.support import wait_until

BATCH_BYTES_MAX = 16 << 20
LEADING_S = 60.0
# What a cleaner may leave behind when it is killed, and must not when all is done.
LEFT_OVERS = (".cleaned", ".swap")


def directory_of(node: Node, place: Place) -> Path:
    found = [
        directory / f"{place.topic}-{place.partition}"
        for directory in node.data_dirs
        if (directory / f"{place.topic}-{place.partition}").is_dir()
    ]
    assert len(found) == 1, f"node {node.id} has {len(found)} directories for {place}"
    return found[0]


def segments_of(node: Node, place: Place) -> list[Path]:
    """By their base offsets, the active one last."""
    return sorted(directory_of(node, place).glob("*.log"))


def records_in_files(node: Node, place: Place) -> tuple[dict[int, Entry], int]:
    """Every record in the segments of a node that is down, and the end of its log.

    Batches must be undamaged and cover all offsets, each beginning where the one before it ends. Aborted records
    are among them, markers are not.
    """
    records: dict[int, Entry] = {}
    expected = 0
    for path in segments_of(node, place):
        data = path.read_bytes()
        assert int(path.stem) == expected, f"{path} begins at {path.stem}, not {expected}"
        size = 0
        for position, header in batches(data):
            where = f"{path} at {position}"
            assert crc_matches(data, position, header), f"{where} is damaged"
            assert header.base_offset == expected, f"{where} begins at {header.base_offset}, not {expected}"
            expected = header.next_offset
            size = position + header.size
            if header.is_control:
                continue
            last = header.base_offset - 1
            for record in decode_records(data, position, bytes_max=BATCH_BYTES_MAX):
                assert last < record.offset <= header.last_offset, f"{where}: offset {record.offset}"
                last = record.offset
                assert record.key is not None, f"{where}: no key at {record.offset}"
                records[record.offset] = Entry(
                    record.key, record.value, tuple(record.headers), record.timestamp
                )
        assert size == len(data), f"{path} has {len(data) - size} bytes behind its last batch"
    return records, expected


def cleaning_state(node: Node, place: Place) -> CleaningState:
    return state_in(directory_of(node, place))


def state_in(directory: Path) -> CleaningState:
    """How far the log in a directory is cleaned."""
    return read_state(MachineFiles(), str(directory))[0]


def is_cleaned(node: Node, place: Place) -> bool:
    """Whether everything before the active segment has been cleaned, and nothing is under way."""
    state = cleaning_state(node, place)
    closed_end = int(segments_of(node, place)[-1].stem)
    return state.swap is None and state.last_run is not None and state.first_dirty_offset >= closed_end


def left_overs(node: Node, place: Place) -> list[Path]:
    return [path for path in directory_of(node, place).iterdir() if path.name.endswith(LEFT_OVERS)]


def lead(cluster: Cluster, node_id: int, places: Sequence[Place]) -> None:
    """Have one node lead partitions of which it has a replica."""
    topics: dict[str, list[int]] = {}
    for place in places:
        topics.setdefault(place.topic, []).append(place.partition)
    moved = [
        ReassignableTopic(
            name=topic,
            partitions=[
                ReassignablePartition(
                    partition_index=partition,
                    replicas=sorted(
                        cluster.partition(topic, partition).replicas, key=lambda each: (each != node_id, each)
                    ),
                )
                for partition in partitions
            ],
        )
        for topic, partitions in topics.items()
    ]
    with Wire(cluster.nodes[cluster.controller()].address, timeout_s=30) as wire:
        answer = wire.call(AlterPartitionReassignmentsRequest(topics=moved, timeout_ms=20_000), 0)
        assert answer.error_code == ErrorCode.NONE, answer
        for topic in answer.responses:
            assert all(each.error_code == ErrorCode.NONE for each in topic.partitions), topic
    for topic in topics:
        # The order of the replicas is not in every broker's metadata at once.
        cluster.wait_for(topic, lambda view: view.replicas[0] == node_id, f"node {node_id} is preferred")
        cluster.wait_in_sync(topic)
    wanted = [TopicPartitions(topic=topic, partitions=partitions) for topic, partitions in topics.items()]

    def all_led() -> bool:
        with Wire(cluster.nodes[cluster.controller()].address, timeout_s=30) as wire:
            wire.call(ElectLeadersRequest(election_type=0, topic_partitions=wanted, timeout_ms=20_000), 2)
        return all(cluster.leader(*place) == node_id for place in places)

    wait_until(all_led, LEADING_S, f"node {node_id} leads")
