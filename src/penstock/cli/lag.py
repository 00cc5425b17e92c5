"""`penstock groups lag`: how far groups are behind, in records and in time, and when they will lose data.

The figures are those of ``monitoring/lag.py``. Rates, and time to loss by size, need two samples: `--watch`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.completion import group_names
from penstock.cli.consume import Isolation
from penstock.cli.failures import Failure
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json, check_group
from penstock.cli.output import Cell, show_table
from penstock.cli.watching import Interval, Watch, begin_screen, show_document, warn, watch
from penstock.cli.wire_client import connected, time_text
from penstock.monitoring.collecting import Collector, Survey
from penstock.monitoring.durations import seconds_text
from penstock.monitoring.lag import LagTracker, PartitionLag, worst_first

COLUMNS = ("GROUP", "TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "AGE", "CHANGE", "LOSS")
INTERVAL_S = 5.0
ROWS_MAX = 50


def lag(
    groups: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[GROUP]",
            callback=check_group,
            autocompletion=group_names,
            help="Default: all groups.",
        ),
    ] = None,
    *,
    watching: Watch = False,
    interval: Interval = INTERVAL_S,
    top: Annotated[
        int, typer.Option("--top", min=1, metavar="N", help="How many rows of the table to show.")
    ] = ROWS_MAX,
    isolation: Annotated[
        Isolation,
        typer.Option("--isolation", help="What the groups read: all records, or only committed ones."),
    ] = Isolation.UNCOMMITTED,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Show how far groups are behind in each partition, the worst first.

    AGE is how old the next unread record is, CHANGE how many records the lag grows or shrinks by each second
    (with --watch), LOSS when retention may delete the next unread record, or how many it has deleted already.
    """
    tracker = LagTracker()
    with connected(bootstrap) as client:
        collector = Collector(client, read_committed=isolation is Isolation.COMMITTED)

        def show() -> None:
            survey = collector.survey(groups or None)
            if not watching:
                _refuse_unknown(groups or [], survey)
            _show(survey, tracker.figures(survey.sample), top, as_json=as_json, is_watching=watching)

        if watching:
            watch(show, interval)
        show()


def _show(survey: Survey, lags: list[PartitionLag], top: int, *, as_json: bool, is_watching: bool) -> None:
    lags = worst_first(lags)
    when = time_text(survey.sample.time_ms)
    if as_json:
        document = {
            "time": when,
            "partitions": [asdict(each) for each in lags],
            "not_seen": list(survey.unseen),
        }
        show_document(document, is_watching=is_watching)
        return
    if is_watching:
        begin_screen()
    show_table(COLUMNS, [_row(each) for each in lags[:top]], title=when if is_watching else None)
    if len(lags) > top:
        print(f"and {len(lags) - top} more; see all with --top {len(lags)} or --json")
    if survey.unseen:
        warn(f"could not see {'; '.join(survey.unseen)}")


def _refuse_unknown(groups: list[str], survey: Survey) -> None:
    for group in groups:
        if group not in survey.sample.committed:
            raise Failure(f"cannot see group {group}: {'; '.join(survey.unseen)}")
        if not survey.sample.committed[group]:
            raise Failure(f"group {group} has no committed offsets; see `penstock groups list`")


def _row(each: PartitionLag) -> list[Cell]:
    return [
        each.group,
        each.topic,
        each.partition,
        each.committed,
        each.end_offset,
        each.lag_records,
        None if each.lag_s is None else seconds_text(each.lag_s),
        None if each.lag_per_s is None else f"{each.lag_per_s:+.3g}/s",
        _loss_text(each),
    ]


def _loss_text(each: PartitionLag) -> str | None:
    if each.lost_records:
        return f"{each.lost_records} lost"
    if each.is_beyond_end:
        return "beyond the end"
    if each.loss_s is None:
        return None
    return (
        f"in {seconds_text(each.loss_s)} by {each.loss_by}" if each.loss_s > 0 else f"now by {each.loss_by}"
    )
