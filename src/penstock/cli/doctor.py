"""`penstock doctor`: examine a cluster and say what to do. The rules are in ``monitoring/findings.py``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from penstock.cli.failures import WrongUsage
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config, Json
from penstock.cli.output import show_table
from penstock.cli.watching import Watch, begin_screen, show_document, warn, watch
from penstock.cli.wire_client import connected, time_text
from penstock.monitoring.alerts import Alerts, Webhook, alert_document, finding_document
from penstock.monitoring.collecting import Collector
from penstock.monitoring.findings import Finding, Severity, Thresholds, examine

app = typer.Typer(add_completion=False)

# Beside those of all commands: nothing more than this was found.
EXIT_CODES = {Severity.INFO: 0, Severity.WARNING: 3, Severity.CRITICAL: 4}
SAMPLE_S = 3.0
INTERVAL_S = 30.0
HOT_TIMES = 10.0
_DEFAULT = Thresholds()


@app.command()
def doctor(
    *,
    watching: Watch = False,
    interval: Annotated[
        float,
        typer.Option("--interval", min=0.1, metavar="SECONDS", help="The time between two examinations."),
    ] = INTERVAL_S,
    sample: Annotated[
        float,
        typer.Option("--sample", min=0.1, metavar="SECONDS", help="The time over which rates are measured."),
    ] = SAMPLE_S,
    webhook: Annotated[
        str | None,
        typer.Option("--webhook", metavar="URL", help="Post findings there as JSON, whenever they change."),
    ] = None,
    hot: Annotated[
        float,
        typer.Option(
            "--hot", min=1, metavar="TIMES", help="A partition is hot above this many times the others."
        ),
    ] = HOT_TIMES,
    lag: Annotated[
        float,
        typer.Option(
            "--lag", min=0, metavar="SECONDS", help="Growing lag counts from this age of a record on."
        ),
    ] = _DEFAULT.lag_s,
    disk: Annotated[
        int,
        typer.Option("--disk", min=1, max=100, metavar="PERCENT", help="A disk is nearly full from this on."),
    ] = int(_DEFAULT.disk * 100),
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> int:
    """Examine the cluster: replication, disks, groups, hot partitions, transactions, certificates.

    Each finding has a severity and what to do. Exit code 0 if there is none, 3 for warnings, 4 if one is critical.
    """
    limits = Thresholds(lag_s=lag, disk=disk / 100, disk_critical=max(_DEFAULT.disk_critical, disk / 100))
    try:
        hook = None if webhook is None else Webhook(webhook)
    except ValueError as error:
        raise WrongUsage(f"--webhook: {error}") from None
    alerts = Alerts()
    with connected(bootstrap) as client:
        collector = Collector(client, context=bootstrap.context)

        def look() -> list[Finding]:
            snapshot = collector.snapshot(hot)
            found, when = examine(snapshot, limits), time_text(snapshot.time_ms)
            _show(found, when, as_json=as_json, is_watching=watching)
            if hook is not None and (change := alerts.change(found)):
                refused = hook.post(alert_document(bootstrap.servers, when, change, found))
                if refused is None:
                    alerts.delivered(found)
                else:
                    warn(f"the alert was not delivered: {refused}")
            return found

        # The first sample is what rates are measured from.
        collector.snapshot(hot)
        time.sleep(sample)
        if watching:
            watch(look, interval)
        found = look()
    return EXIT_CODES[max((each.severity for each in found), default=Severity.INFO)]


def _show(found: list[Finding], when: str | None, *, as_json: bool, is_watching: bool) -> None:
    if as_json:
        document = {"time": when, "findings": [finding_document(each) for each in found]}
        show_document(document, is_watching=is_watching)
        return
    if is_watching:
        begin_screen()
    if max((each.severity for each in found), default=Severity.INFO) == Severity.INFO:
        print(f"{when}  nothing is wrong" if is_watching else "nothing is wrong")
    if found:
        show_table(
            ("SEVERITY", "RULE", "ABOUT", "WHAT", "WHAT TO DO"),
            [(each.severity.name.lower(), each.rule, each.subject, each.what, each.advice) for each in found],
            title=when if is_watching else None,
        )
