"""`penstock spark`: run the jobs of ``penstock.spark.jobs`` on any Spark master.

Each command checks what it can without Spark, starts a session (``spark_session.py``), calls the job function of
the same name, and shows the result. The job functions' docstrings are the reference.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from confluent_kafka.admin import AdminClient

from penstock.cli import client
from penstock.cli.completion import topic_names
from penstock.cli.connection import Brokers
from penstock.cli.failures import WrongUsage
from penstock.cli.options import BOOTSTRAP, Bootstrap, Config
from penstock.cli.output import bytes_text, count_text, show_json, show_table
from penstock.cli.positions import HELP as POSITIONS
from penstock.cli.positions import Position, parse_position, resolve
from penstock.cli.produce import Compression
from penstock.cli.settings import parse_settings
from penstock.cli.spark_rows import cell, column_values, plain, show_rows, speed_text
from penstock.cli.spark_session import spark_session

app = typer.Typer(
    add_completion=False,
    help="Run jobs on topics with Spark: archive, table, snapshot, replay, profile.",
)

# Spark's LIMIT is a 32-bit integer.
ROWS_MAX = 2**31 - 1


class Format(StrEnum):
    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)]
Topics = Annotated[list[str], typer.Argument(metavar="TOPIC...", autocompletion=topic_names)]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark master. Default: all cores of this machine."),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting. Repeatable."),
]
ValueSchema = Annotated[
    str | None,
    typer.Option(
        "--value-schema", metavar="COLUMNS", help="Parse values as JSON, such as 'id BIGINT, name STRING'."
    ),
]
AllowDataLoss = Annotated[
    bool,
    typer.Option("--allow-data-loss", help="Continue without records that retention has deleted."),
]
Catalog = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="NAME:NAMESPACE.TABLE",
        help="An Iceberg catalog in pyiceberg's configuration, and the table.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command()
def archive(
    topics: Topics,
    *,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory of the table.")],
    format: Annotated[Format, typer.Option("--format", help="Format of the table.")] = Format.PARQUET,
    by_date: Annotated[
        bool, typer.Option("--by-date/--no-by-date", help="Partition files by the day of their records.")
    ] = True,
    headers: Annotated[
        bool, typer.Option("--headers/--no-headers", help="Keep the records' headers.")
    ] = True,
    value_schema: ValueSchema = None,
    every: Annotated[
        float | None,
        typer.Option("--every", min=0.001, metavar="SECONDS", help="Repeat with this pause until stopped."),
    ] = None,
    file_mb: Annotated[
        int, typer.Option("--file-mb", min=1, metavar="MB", help="Approximate size of a file.")
    ] = 256,
    allow_data_loss: AllowDataLoss = False,
    catalog: Catalog = None,
    master: Master = None,
    conf: Conf = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Append topics to an archive table of Parquet files, from the table's end to the topics' ends."""
    settings = _spark_settings(conf)
    _check_topics(bootstrap, topics)
    stop = threading.Event()
    if every is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    with spark_session("archive", master, settings) as (spark, bar):
        from penstock.spark import jobs  # noqa: PLC0415  # pyspark

        result = jobs.archive(
            spark,
            bootstrap.servers,
            topics,
            to,
            format=format.value,
            by_date=by_date,
            headers=headers,
            value_schema=value_schema,
            every_seconds=every,
            file_mb=file_mb,
            options=_source_options(bootstrap),
            fail_on_data_loss=not allow_data_loss,
            catalog=catalog,
            stop=stop,
            progress=bar.show,
        )
    if as_json:
        show_json({"job": "archive", **asdict(result)})
        return
    show_rows(*result.as_table())
    print(
        f"archived {count_text(result.records, 'record')} to {count_text(result.files, 'file')} "
        f"of {bytes_text(result.bytes)} in {speed_text(result.records, result.seconds)}: {result.location}"
    )


@app.command()
def table(
    topic: Topic,
    *,
    archived: Annotated[str, typer.Option("--archive", metavar="DIR", help="Directory of the archive.")],
    sql: Annotated[
        str | None,
        typer.Option(
            "--sql", metavar="QUERY", help="Query a view named after the topic, with _ for . and -."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, max=ROWS_MAX, metavar="ROWS", help="Show at most this many rows.")
    ] = 20,
    format: Annotated[
        Format | None, typer.Option("--format", help="Format of the archive. Default: detected.")
    ] = None,
    catalog: Catalog = None,
    allow_data_loss: AllowDataLoss = False,
    master: Master = None,
    conf: Conf = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Query a topic and its archive as one table: count, columns and first rows, or --sql."""
    settings = _spark_settings(conf)
    _connect(bootstrap)
    view = re.sub(r"\W", "_", topic, flags=re.ASCII)
    with spark_session("table", master, settings) as (spark, _):
        from penstock.spark import jobs  # noqa: PLC0415  # pyspark

        frame = jobs.table(
            spark,
            bootstrap.servers,
            topic,
            archived,
            format=None if format is None else format.value,
            catalog=catalog,
            view=f"`{view}`",  # quoted, or topics 2024 and 1e5 would be numbers
            options=_source_options(bootstrap),
            fail_on_data_loss=not allow_data_loss,
        )
        found = frame if sql is None else spark.sql(sql)
        count = None if sql is not None else found.count()
        columns = [
            {"column": each.name, "type": each.dataType.simpleString()} for each in found.schema.fields
        ]
        # As Arrow, which keeps apart times with and without a zone.
        held = found.limit(limit).toArrow()
    rows = list(zip(*(column_values(each) for each in held.columns)))
    names = [each["column"] for each in columns]
    if as_json:
        document: dict[str, Any] = {"job": "table", "topic": topic, "view": view}
        if count is not None:
            document["records"] = count
        document["columns"] = columns
        document["rows"] = [dict(zip(names, map(plain, row))) for row in rows]
        show_json(document)
        return
    if sql is None:
        print(f"{count_text(count or 0, 'record')} of {topic}")
        show_table(("COLUMN", "TYPE"), [tuple(each.values()) for each in columns])
        print()
    show_table(names, [[cell(each) for each in row] for row in rows], shorten=True)


@app.command()
def files(
    archived: Annotated[str, typer.Argument(metavar="DIR", help="Directory of the archive.")],
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.")] = None,
    catalog: Catalog = None,
    as_json: Json = False,
) -> None:
    """List an archive's Parquet files at its newest commit, for readers other than Spark."""
    from penstock.spark.errors import SparkOptionError  # noqa: PLC0415
    from penstock.spark.jobs.files import archive_files  # noqa: PLC0415

    try:
        found = archive_files(archived, topic, catalog=catalog)
    except SparkOptionError as error:
        raise WrongUsage(str(error)) from None
    if as_json:
        show_json({"job": "files", "files": found})
        return
    for each in found:
        print(each)


@app.command()
def snapshot(
    topic: Topic,
    *,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="Directory of the snapshot.")],
    archived: Annotated[
        str | None,
        typer.Option(
            "--archive", metavar="DIR", help="Read records from this archive that brokers no longer have."
        ),
    ] = None,
    value_schema: ValueSchema = None,
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", min=0, metavar="H", help="How long a deleted key is remembered.")
    ] = 24,
    full: Annotated[
        bool, typer.Option("--full", help="Read everything again, not only new records.")
    ] = False,
    allow_data_loss: AllowDataLoss = False,
    master: Master = None,
    conf: Conf = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Maintain a table with the newest value of each key; reads only records since the last run."""
    settings = _spark_settings(conf)
    _check_topics(bootstrap, [topic])
    with spark_session("snapshot", master, settings) as (spark, bar):
        from penstock.spark import jobs  # noqa: PLC0415  # pyspark

        result = jobs.snapshot(
            spark,
            bootstrap.servers,
            topic,
            to,
            archive=archived,
            value_schema=value_schema,
            grace_hours=grace_hours,
            full=full,
            options=_source_options(bootstrap),
            fail_on_data_loss=not allow_data_loss,
            progress=bar.show,
        )
    if as_json:
        show_json({"job": "snapshot", **asdict(result)})
        return
    show_rows(*result.as_table())


@app.command()
def replay(
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    target: Annotated[str, typer.Argument(metavar="TARGET")],
    *,
    start: Annotated[str, typer.Option("--from", metavar="POSITION", help=f"{POSITIONS}.")] = "beginning",
    until: Annotated[str, typer.Option("--until", metavar="POSITION", help="As --from. Exclusive.")] = "end",
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", min=0, metavar="N", help="Only this source partition. Repeatable."),
    ] = None,
    by_key: Annotated[
        bool,
        typer.Option("--by-key", help="Choose the target partition by key. Default: the same partition."),
    ] = False,
    records_per_second: Annotated[
        float | None, typer.Option("--records-per-second", min=0.001, metavar="N", help="Rate limit.")
    ] = None,
    bytes_per_second: Annotated[
        float | None, typer.Option("--bytes-per-second", min=0.001, metavar="N", help="Rate limit.")
    ] = None,
    compression: Annotated[Compression, typer.Option("--compression", "-z")] = Compression.NONE,
    create: Annotated[
        bool, typer.Option("--create", help="Create a missing target with the source's number of partitions.")
    ] = False,
    into_itself: Annotated[
        bool, typer.Option("--into-itself", help="Allow target and source to be the same topic.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and count, send nothing.")] = False,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="NAME", help="Continue a replay that stopped."),
    ] = None,
    allow_data_loss: AllowDataLoss = False,
    master: Master = None,
    conf: Conf = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Send a topic's records to another topic again, with headers that name their origin."""
    settings = _spark_settings(conf)
    admin = _connect(bootstrap)
    numbers = _wanted_partitions(admin, source, partition)
    first, last = _position("--from", start), _position("--until", until)
    starts, ends = (resolve(admin, source, numbers, each) for each in (first, last))
    run = uuid.uuid4().hex[:12] if run_id is None else run_id
    try:
        with spark_session("replay", master, settings) as (spark, bar):
            from penstock.spark import jobs  # noqa: PLC0415  # pyspark

            result = jobs.replay(
                spark,
                bootstrap.servers,
                source,
                target,
                # Keep the word: it tells a continued replay that the whole topic was requested.
                starting_offsets="earliest" if first.kind == "beginning" else json.dumps({source: starts}),
                ending_offsets=json.dumps(
                    {source: {each: max(end, starts[each]) for each, end in ends.items()}}
                ),
                partitions=numbers,
                keep_partitions=not by_key,
                records_per_second=records_per_second,
                bytes_per_second=bytes_per_second,
                compression=compression.value,
                create_target=create,
                into_itself=into_itself,
                options=_source_options(bootstrap),
                fail_on_data_loss=not allow_data_loss,
                dry_run=dry_run,
                run_id=run,
                progress=bar.show,
            )
    except KeyboardInterrupt:
        if not dry_run:
            print(f"stopped; continue with --run-id {run}", file=sys.stderr)
        raise
    if as_json:
        show_json({"job": "replay", **asdict(result)})
        return
    show_rows(*result.as_table())
    verb = "would send" if result.is_dry_run else "sent"
    print(
        f"{verb} {count_text(result.records, 'record')}, {bytes_text(result.bytes)}, "
        f"in {speed_text(result.records, result.seconds)}; run {result.run_id}"
    )
    if not result.keeps_timestamps:
        print(f"{target} has LogAppendTime: its records have the time of the replay, not the original time")


@app.command()
def profile(
    topics: Topics,
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="Directory for tables (Parquet) and plots (PNG).")
    ],
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", min=1000, metavar="N", help="Estimate from at most N records of each partition."
        ),
    ] = None,
    master: Master = None,
    conf: Conf = None,
    bootstrap: Bootstrap = BOOTSTRAP,
    _config: Config = None,
    as_json: Json = False,
) -> None:
    """Profile topics: sizes, skew, hot keys, lag, growth, and when retention starts to delete."""
    settings = _spark_settings(conf)
    _check_topics(bootstrap, topics)
    with spark_session("profile", master, settings) as (spark, bar):
        from penstock.spark import jobs  # noqa: PLC0415  # pyspark

        result = jobs.profile(
            spark,
            bootstrap.servers,
            list(dict.fromkeys(topics)),
            to,
            sample=sample,
            progress=bar.show,
            options=_source_options(bootstrap),
        )
        from penstock.spark.jobs.profile_tables import tables  # noqa: PLC0415
    if as_json:
        found = [
            {name: plain(each) for name, each in row.items()}
            for row in tables(result.topics)["topics"].to_pylist()
        ]
        show_json({"job": "profile", "topics": found, "files": result.files})
        return
    show_rows(*result.as_table())
    if any(each.is_reckoned for each in result.topics):
        print(f"estimated from a sample of {sample} records of each partition")
    for each in result.files:
        print(each)


# Shared by all commands


def _spark_settings(conf: Sequence[str] | None) -> dict[str, str]:
    return parse_settings("--conf", conf or [], example="spark.driver.memory=4g")


def _connect(bootstrap: Brokers) -> AdminClient:
    _source_options(bootstrap)  # before anything takes time
    return client.connect(bootstrap)


def _source_options(bootstrap: Brokers) -> dict[str, str]:
    """How the jobs connect, under Spark's names."""
    from penstock.spark.errors import SparkOptionError  # noqa: PLC0415
    from penstock.spark.librdkafka import spark_options  # noqa: PLC0415

    try:
        return spark_options(bootstrap.security)
    except SparkOptionError as error:
        raise WrongUsage(str(error)) from None


def _check_topics(bootstrap: Brokers, topics: Iterable[str]) -> None:
    """Check that a broker answers and the topics exist, before Spark starts, which takes seconds."""
    admin = _connect(bootstrap)
    for each in topics:
        client.describe_topic(admin, each)


def _wanted_partitions(admin: AdminClient, topic: str, wanted: Sequence[int] | None) -> list[int]:
    existing = client.partition_numbers(admin, topic)
    if not wanted:
        return existing
    for number in wanted:
        if number not in existing:
            raise WrongUsage(f"topic {topic} has no partition {number}; it has {len(existing)}")
    return sorted(set(wanted))


def _position(option: str, text: str) -> Position:
    try:
        return parse_position(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from None
