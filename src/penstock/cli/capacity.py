"""`penstock capacity`: estimate bytes, nodes and partitions from a rate, a record size and a retention.

Every figure is given twice. *Exact* is arithmetic. *On paper* is the estimate as people make it at a whiteboard:
daily figures are cut to two digits (86.4 TB is 86 TB) and the rest is computed from those, which gives a design
document's 258 TB a day and 7.7 PB a month. Units are decimal.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from penstock.cli.failures import WrongUsage
from penstock.cli.options import Json
from penstock.cli.output import bytes_text, scaled_text, show_json, show_table

app = typer.Typer(add_completion=False)

SECONDS_PER_DAY = 86_400

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]I?|)B?(?:/S)?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")
_DURATION_S = {"s": 1, "m": 60, "h": 3_600, "d": SECONDS_PER_DAY, "w": 7 * SECONDS_PER_DAY}


@dataclass(frozen=True, slots=True)
class Workload:
    records_per_s: float = 1_000_000
    # The peak rate that nodes and partitions must carry. None: the average.
    peak_records_per_s: float | None = None
    record_bytes: float = 1_000
    retention_days: float = 7
    replication: int = 3
    # Consumer groups that each read everything.
    readers: int = 1
    node_write_bytes_per_s: float = 100e6
    # Each way: a 10 Gbit/s card.
    node_network_bytes_per_s: float = 1.25e9
    # None: unlimited; the estimate says how much a node needs.
    node_storage_bytes: float | None = None
    # The throughput of one consumer: a partition has one consumer in a group.
    partition_bytes_per_s: float = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    records_per_day: float
    ingress_bytes_per_s: float
    replicated_bytes_per_s: float
    bytes_per_day: float
    bytes_per_day_replicated: float
    # One copy, then all copies.
    retained_bytes: float
    retained_bytes_replicated: float
    nodes_for_writes: int
    nodes_for_network: int
    nodes_for_storage: int | None
    nodes: int
    storage_bytes_per_node: float
    partitions: int


def estimate(workload: Workload) -> Estimate:
    records_per_day = workload.records_per_s * SECONDS_PER_DAY
    return _estimate(workload, records_per_day, records_per_day * workload.record_bytes)


def estimate_on_paper(workload: Workload) -> Estimate:
    """The same estimate from daily figures cut to two digits."""
    exact = estimate(workload)
    return _estimate(workload, cut(exact.records_per_day), cut(exact.bytes_per_day))


def _estimate(workload: Workload, records_per_day: float, bytes_per_day: float) -> Estimate:
    ingress = workload.records_per_s * workload.record_bytes
    peak = (workload.peak_records_per_s or workload.records_per_s) * workload.record_bytes
    retained = bytes_per_day * workload.retention_days
    retained_replicated = retained * workload.replication
    for_writes = _ceil(peak * workload.replication / workload.node_write_bytes_per_s)
    # The network is full duplex. In: every copy. Out: the copies for followers and readers.
    carried = peak * max(workload.replication, workload.replication - 1 + workload.readers)
    for_network = _ceil(carried / workload.node_network_bytes_per_s)
    for_storage = (
        None
        if workload.node_storage_bytes is None
        else _ceil(retained_replicated / workload.node_storage_bytes)
    )
    # Each copy of a partition is on another node.
    nodes = max(for_writes, for_network, for_storage or 0, workload.replication)
    return Estimate(
        records_per_day=records_per_day,
        ingress_bytes_per_s=ingress,
        replicated_bytes_per_s=ingress * workload.replication,
        bytes_per_day=bytes_per_day,
        bytes_per_day_replicated=bytes_per_day * workload.replication,
        retained_bytes=retained,
        retained_bytes_replicated=retained_replicated,
        nodes_for_writes=for_writes,
        nodes_for_network=for_network,
        nodes_for_storage=for_storage,
        nodes=nodes,
        storage_bytes_per_node=retained_replicated / nodes,
        partitions=_ceil(peak / workload.partition_bytes_per_s),
    )


def cut(amount: float) -> float:
    """Keep the first two digits: 86.4 becomes 86."""
    if amount <= 0:
        return 0.0
    unit: float = 10.0 ** (math.floor(math.log10(amount)) - 1)
    return math.floor(amount / unit) * unit


def _ceil(amount: float) -> int:
    """Round up, but ignore float error: 3e9 / 100e6 is 30 nodes, not 31."""
    return math.ceil(round(amount, 6))


def parse_amount(text: str) -> float:
    """Parse 1M, 1.5KB, 100 MB/s, 64KiB. K is 1000, Ki is 1024. Raises ValueError."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not an amount; write a number with K, M, G, T or P, such as 1M or 100MB/s"
        )
    return float(match[1]) * (_DECIMAL | _BINARY)[match[2].upper()]


def parse_days(text: str) -> float:
    """Parse 7d, 12h, 2w into days. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is not a duration; write a number with s, m, h, d or w, such as 7d or 12h"
        )
    return float(match[1]) * _DURATION_S[match[2]] / SECONDS_PER_DAY


@app.command()
def capacity(
    *,
    rate: Annotated[str, typer.Option("--rate", metavar="N", help="Records a second, on average.")] = "1M",
    peak: Annotated[
        str | None,
        typer.Option("--peak", metavar="N", help="Records a second at peak. Default: the average."),
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="BYTES", help="Bytes per record.")] = "1KB",
    retention: Annotated[
        str, typer.Option("--retention", metavar="TIME", help="How long records are kept.")
    ] = "7d",
    replication: Annotated[
        int, typer.Option("--replication", min=1, metavar="N", help="Copies of each record.")
    ] = 3,
    readers: Annotated[
        int, typer.Option("--readers", min=0, metavar="N", help="Consumer groups that read everything.")
    ] = 1,
    node_write: Annotated[
        str, typer.Option("--node-write", metavar="BYTES/s", help="Write rate of a node's disk.")
    ] = "100MB/s",
    node_network: Annotated[
        str, typer.Option("--node-network", metavar="BYTES/s", help="Network rate of a node, each way.")
    ] = "1.25GB/s",
    node_storage: Annotated[
        str | None,
        typer.Option(
            "--node-storage", metavar="BYTES", help="Size of a node's disk. Default: what it needs."
        ),
    ] = None,
    partition_rate: Annotated[
        str,
        typer.Option(
            "--partition-rate", metavar="BYTES/s", help="Throughput of one consumer of a partition."
        ),
    ] = "1MB/s",
    as_json: Json = False,
) -> None:
    """Estimate bytes, nodes and partitions for a rate of records.

    "On paper" is the estimate as made by hand: daily figures cut to two digits, the rest computed from them.
    """
    try:
        workload = Workload(
            records_per_s=_positive("--rate", parse_amount(rate)),
            peak_records_per_s=None if peak is None else _positive("--peak", parse_amount(peak)),
            record_bytes=_positive("--size", parse_amount(size)),
            retention_days=parse_days(retention),
            replication=replication,
            readers=readers,
            node_write_bytes_per_s=_positive("--node-write", parse_amount(node_write)),
            node_network_bytes_per_s=_positive("--node-network", parse_amount(node_network)),
            node_storage_bytes=(
                None if node_storage is None else _positive("--node-storage", parse_amount(node_storage))
            ),
            partition_bytes_per_s=_positive("--partition-rate", parse_amount(partition_rate)),
        )
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    if workload.peak_records_per_s is not None and workload.peak_records_per_s < workload.records_per_s:
        raise WrongUsage(f"--peak {peak} is below --rate {rate}; the peak must be at least the average")
    exact, paper = estimate(workload), estimate_on_paper(workload)
    if as_json:
        show_json({"workload": asdict(workload), "exact": asdict(exact), "on_paper": asdict(paper)})
    else:
        show_table(("", "EXACT", "ON PAPER"), _rows(workload, exact, paper))


def _positive(option: str, amount: float) -> float:
    if amount <= 0:
        raise ValueError(f"{option} must be more than 0")
    return amount


def _rows(workload: Workload, exact: Estimate, paper: Estimate) -> list[tuple[str, str, str]]:
    days, copies = f"{workload.retention_days:g} d", workload.replication
    labelled = {
        "records_per_day": "records a day",
        "ingress_bytes_per_s": "written by producers",
        "replicated_bytes_per_s": f"written with {copies} copies",
        "bytes_per_day": "bytes a day, one copy",
        "bytes_per_day_replicated": f"bytes a day, {copies} copies",
        "retained_bytes": f"kept for {days}, one copy",
        "retained_bytes_replicated": f"kept for {days}, {copies} copies",
        "nodes_for_writes": f"nodes for writing at {bytes_text(workload.node_write_bytes_per_s)}/s",
        "nodes_for_network": f"nodes for network at {bytes_text(workload.node_network_bytes_per_s)}/s",
        "nodes_for_storage": "nodes for storage",
        "nodes": "nodes",
        "storage_bytes_per_node": "storage on each node",
        "partitions": "partitions",
    }
    return [
        (label, _cell(name, getattr(exact, name)), _cell(name, getattr(paper, name)))
        for name, label in labelled.items()
        if getattr(exact, name) is not None
    ]


def _cell(name: str, amount: float) -> str:
    if "bytes" in name:
        return bytes_text(amount) + ("/s" if name.endswith("_per_s") else "")
    return scaled_text(amount, ("", "K", "M", "G", "T")) if name == "records_per_day" else str(amount)
