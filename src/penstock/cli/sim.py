"""`penstock sim`: simulate whole clusters in virtual time, from a seed.

The seed decides everything: the cluster, its clients, the faults and their times. So one command line replays a run
that found a violation, on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Annotated, Any

import typer

from penstock.cli.drawing import progress_bar
from penstock.cli.failures import Failure, WrongUsage
from penstock.cli.options import Json
from penstock.cli.output import count_text, show_json, show_table
from penstock.sim.report import Report, known_cores, run_core

app = typer.Typer(
    add_completion=False,
    help="Simulate clusters with clients and faults in virtual time, from a seed, and check the results.",
)

# Lines of the nodes' logs shown with a violation.
LOG_LINES = 40
# Counts in the summary, in this order; --json shows all.
SHOWN = ("acknowledged", "read", "compared", "commits", "elections", "starts", "faults")

Seed = Annotated[int, typer.Option("--seed", metavar="N", help="The first seed.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, metavar="COUNT", help="Number of seeds, counting up.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, metavar="N", help="Processes to use.")]


@app.callback(invoke_without_command=True)
def sim(
    context: typer.Context,
    *,
    seed: Seed = 1,
    seeds: Seeds = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, metavar="S", help="Virtual time under faults, per seed.")
    ] = 60,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, max=9, metavar="N", help="Number of nodes. Default: the seed decides."
        ),
    ] = None,
    plans: Annotated[
        int,
        typer.Option(
            "--plans",
            min=1,
            metavar="GENERATION",
            help="Fault plans: 1 keeps the meaning of older seeds, the newest has every fault.",
        ),
    ] = 1,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> int:
    """Simulate a cluster under faults, then check everything that clients and nodes saw."""
    if context.invoked_subcommand is not None:
        return 0
    from penstock.sim import swarm  # noqa: PLC0415  # the whole broker
    from penstock.sim.plans import NEWEST  # noqa: PLC0415

    if plans > NEWEST:
        raise WrongUsage(f"--plans {plans} does not exist; the newest generation is {NEWEST}")
    one = partial(swarm.run, seconds=seconds, nodes=nodes, generation=plans)
    return _show(_run_all(one, range(seed, seed + seeds), jobs, "simulating"), SHOWN, as_json=as_json)


@app.command()
def cores(
    *,
    seed: Seed = 1,
    seeds: Seeds = 1,
    core: Annotated[
        list[str] | None, typer.Option("--core", metavar="NAME", help="Only this core. Repeatable.")
    ] = None,
    jobs: Jobs = 1,
    as_json: Json = False,
) -> int:
    """Simulate single cores without brokers or bytes: thousands of seeds a minute."""
    known = known_cores()
    for name in core or []:
        if name not in known:
            raise WrongUsage(f"unknown core {name}; choose from {', '.join(known)}")
    reports: list[Report] = []
    began = time.monotonic()
    for name in core or known:
        found, _ = _run_all(partial(run_core, name), range(seed, seed + seeds), jobs, name)
        reports += found
    return _show((reports, time.monotonic() - began), (), as_json=as_json)


def _run_all(
    one: Callable[[int], Report], seeds: range, jobs: int, description: str
) -> tuple[list[Report], float]:
    began = time.monotonic()
    reports: list[Report] = []
    with progress_bar(description, len(seeds)) as bar:
        for report in _reports(one, seeds, jobs):
            reports.append(report)
            bar.show(len(reports))
    return reports, time.monotonic() - began


def _reports(one: Callable[[int], Report], seeds: range, jobs: int) -> Iterator[Report]:
    if jobs == 1 or len(seeds) == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(one, seeds)


def _show(found: tuple[list[Report], float], shown: tuple[str, ...], *, as_json: bool) -> int:
    reports, elapsed_s = found
    bad = [report for report in reports if not report.is_good]
    if as_json:
        show_json([_document(report) for report in reports])
    else:
        for what in dict.fromkeys(report.what for report in reports):
            _show_totals([report for report in reports if report.what == what], shown)
        virtual_s = sum(report.virtual_ms for report in reports) / 1000
        print(
            f"{count_text(len(reports), 'run')}, {virtual_s / 3600:.1f} virtual hours in {elapsed_s:.0f} s "
            f"({virtual_s / max(elapsed_s, 0.001):.0f} times real time), {count_text(len(bad), 'violation')}"
        )
        if len(reports) == 1:
            print(f"trace {reports[0].trace_hash}")
        for report in bad:
            print()
            for line in report.log[-LOG_LINES:]:
                print(line)
            print(report.violation)
            print(f"replay: {report.replay}")
    if bad:
        raise Failure(f"{count_text(len(bad), 'violation')}; replay the first: {bad[0].replay}")
    return 0


def _show_totals(reports: list[Report], shown: tuple[str, ...]) -> None:
    totals: dict[str, int] = {}
    for report in reports:
        for name, count in report.counts.items():
            totals[name] = totals.get(name, 0) + count
    faults = {name: count for name, count in totals.items() if name.startswith("fault: ")}
    names = [*(shown or [name for name in totals if name not in faults]), *faults]
    show_table(
        ["what", "count", "least in a run"],
        [
            (
                name.removeprefix("fault: "),
                totals.get(name, 0),
                min(report.counts.get(name, 0) for report in reports),
            )
            for name in names
        ],
        title=f"{reports[0].what}: {count_text(len(reports), 'seed')}",
    )


def _document(report: Report) -> dict[str, Any]:
    return {
        "what": report.what,
        "seed": report.seed,
        "violation": report.violation,
        "virtual_ms": report.virtual_ms,
        "events": report.events,
        "trace_hash": report.trace_hash,
        "counts": dict(report.counts),
        "replay": report.replay,
    }
