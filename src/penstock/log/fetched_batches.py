"""What a follower got from its leader, looked at before a byte of it is written.

A fetch answer holds whole batches, the last of which may be cut off (KIP-74). The network has its own
checksums and the leader checks what it sends, but memory errs too: a batch that was damaged on the way must
not become this replica's truth. So the CRC of each is computed here, and what the CRC does not cover, offset
and leader epoch, must follow from the batch before.
"""

from __future__ import annotations

from crc32c import crc32c

from penstock.environment import Buffer
from penstock.protocol.records import CRC_START, BatchHeader, CorruptBatch, batches


def good_from(data: Buffer, next_offset: int) -> tuple[list[BatchHeader], CorruptBatch | None]:
    """The batches at the beginning of the data that continue a log, and what is wrong with the one behind them."""
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
    """Where the first batch begins, if the offset lies inside it."""
    try:
        header = next((header for _, header in batches(memoryview(data))), None)
    except CorruptBatch:
        return None
    if header is None or not header.base_offset < offset <= header.last_offset:
        return None
    return header.base_offset
