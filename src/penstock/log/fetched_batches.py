"""Checks the batches a follower fetched from its leader, before any of them is written.

A fetch response holds whole batches, the last of which may be cut short (KIP-74). The network has its own
checksums and the leader checks what it sends, but memory can fail too: a batch damaged on the way must not be
stored on this replica. So the CRC of each batch is verified here. Offset and leader epoch, which the CRC does
not cover, must follow from the batch before.
"""

from __future__ import annotations

from crc32c import crc32c

from penstock.environment import Buffer
from penstock.protocol.records import CRC_START, BatchHeader, CorruptBatch, batches, crc_matches, filler


def good_from(data: Buffer, next_offset: int) -> tuple[list[BatchHeader], CorruptBatch | None]:
    """Return the leading batches that continue a log, and what is wrong with the batch after them, if anything."""
    headers: list[BatchHeader] = []
    epoch = -1
    with memoryview(data) as view:
        try:
            for position, header in batches(view):
                if header.base_offset != next_offset or header.last_offset_delta < 0:
                    raise CorruptBatch(f"offset {header.base_offset} in a log that ends at {next_offset}")
                if header.leader_epoch < epoch:
                    raise CorruptBatch(f"epoch {header.leader_epoch} at {next_offset} follows epoch {epoch}")
                with view[position + CRC_START : position + header.size] as covered:
                    if crc32c(covered) != header.crc:
                        raise CorruptBatch(f"the CRC of the batch at offset {next_offset} does not match")
                headers.append(header)
                epoch = header.leader_epoch
                next_offset = header.next_offset
        except CorruptBatch as error:
            return headers, error
    return headers, None


def first_holding(data: Buffer, offset: int) -> int | None:
    """Return the base offset of the first batch if ``offset`` lies inside it, after its first record."""
    try:
        header = next((header for _, header in batches(memoryview(data))), None)
    except CorruptBatch:
        return None
    if header is None or not header.base_offset < offset <= header.last_offset:
        return None
    return header.base_offset


def without_overlap(data: Buffer, next_offset: int) -> Buffer:
    """Let the first batch begin at the log's end, if it is a filler that covers offsets before it too.

    The leader has compacted batches, of which this log has some, and covers all of them by one filler. No other
    batch covers more offsets than it did when this replica fetched those before it.
    """
    try:
        header = next((header for _, header in batches(memoryview(data))), None)
    except CorruptBatch:
        return data
    if (
        header is None
        or not header.is_filler
        or not header.base_offset < next_offset <= header.last_offset
        or not crc_matches(data, 0, header)
    ):
        return data
    return filler(next_offset, header.last_offset, header.leader_epoch) + bytes(data[header.size :])


def is_compacted(data: Buffer) -> bool:
    """Whether records are missing among these batches."""
    try:
        return any(header.count <= header.last_offset_delta for _, header in batches(memoryview(data)))
    except CorruptBatch:
        return False
