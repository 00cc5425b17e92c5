"""The example does what its README says, to the letter; and what it says is true.

The README's output is compared as it stands. Its figures are then found a second way, from the topics alone, with
librdkafka and plain Python.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.interop.adapters.confluent import ConfluentClient
from tests.spark.standalone import JAVA_OPTIONS
from tests.support import BrokerProcess
from tests.tools import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 600
PARTITIONS = 3

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def run(scratch: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As a user would run it, but that Spark's own files go to a directory of the test."""
    command = [sys.executable, EXAMPLES / "pipeline.py", *arguments]
    environment = {
        **os.environ,
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS.format(scratch),
        "SPARK_LOCAL_DIRS": str(scratch),
        "TMPDIR": str(scratch),
    }
    return subprocess.run(
        command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def values(client: ConfluentClient, topic: str) -> list[Any]:
    ends = {each: client.offset(topic, each, "latest") or 0 for each in range(PARTITIONS)}
    records = client.consume(topic, dict.fromkeys(ends, 0), sum(ends.values()))
    return [json.loads(record.value or b"") for record in records]


def minute(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%H:%M")


def test_the_pipeline_prints_what_its_readme_shows(
    bootstrap: str, unique: Callable[[str], str], tmp_path: Path
) -> None:
    name = unique("shop")

    done = run(tmp_path, "--bootstrap", bootstrap, "--name", name)

    assert done.returncode == 0, done.stderr[-6000:]
    shown = re.search(r"It prints\n\n```\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert {path.name for path in (tmp_path / "pipeline-data").iterdir()} == {
        "archive",
        "archive.penstock",
        "checkpoint",
    }
    assert done.stdout.strip() == shown[1].strip()

    client = ConfluentClient(bootstrap)
    orders = values(client, f"{name}-orders")
    assert len(orders) == 1501
    late = [order for order in orders if order["cents"] == 100_000]
    assert len(late) == 1
    expected: Counter[tuple[str, str]] = Counter()
    for order in orders:
        if order not in late:
            expected[minute(order["at"]), order["shop"]] += order["cents"]
    told = values(client, f"{name}-revenue")
    client.close()
    # The newest order is of 12:15:11, so with half a minute of patience the minute of 12:14 is not over.
    open_still = {key for key in expected if key[0] >= "12:14"}
    assert len(told) == len(expected) - len(open_still)
    assert {(minute(each["minute"]), each["shop"]): each["cents"] for each in told} == {
        key: cents for key, cents in expected.items() if key not in open_still
    }


def test_a_second_run_on_the_same_topics_is_refused_in_one_line(tmp_path: Path) -> None:
    with BrokerProcess() as broker:
        client = ConfluentClient(broker.bootstrap)
        client.create_topic("shop-orders", partitions=1)
        client.close()

        done = run(tmp_path, "--bootstrap", broker.bootstrap)

    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"topic shop-orders cannot be made: .* \(--name chooses other names\)\n", done.stderr)
    assert not list(tmp_path.iterdir())
