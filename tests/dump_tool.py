"""Apache Kafka's DumpLogSegments, which reads the files of a log and says what is wrong with them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.java import KAFKA_VERSION, classpath, jars

COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
)
TOOL = "org.apache.kafka.tools.DumpLogSegments"
TIMEOUT_S = 600
COMPLAINTS = (
    "Mismatch",
    "mismatch",
    "Exception",
    "out of order",
    "not found",
    "Ignoring",
    "isvalid: false",
)


def dump(files: Sequence[Path], *options: str) -> str:
    """What the tool prints about files, on both streams. Skips the test, or fails it in CI, without Java."""
    classpath(*COORDINATES)
    return "\n".join(dump_lines(files, *options))


def dump_lines(files: Sequence[Path], *options: str) -> Iterator[str]:
    """The same line by line, for files of any size. Raises Missing without Java."""
    assert files
    class_path = os.pathsep.join(map(str, jars(*COORDINATES)))
    command = [
        "java",
        "-Xshare:auto",
        "-cp",
        class_path,
        TOOL,
        "--files",
        ",".join(map(str, files)),
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # Reading a pipe has no timeout of its own; the end of the process ends it.
    alarm = threading.Timer(TIMEOUT_S, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("SLF4J"):
                yield line.rstrip("\n")
        assert process.wait() == 0, f"the dump tool ended with status {process.returncode}"
    finally:
        alarm.cancel()
        process.kill()
        process.communicate()


def assert_no_complaint(output: str) -> None:
    for complaint in COMPLAINTS:
        assert complaint not in output, output[max(0, output.index(complaint) - 300) :][:1000]
