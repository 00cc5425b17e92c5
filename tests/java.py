"""Jars from Maven Central, for what only Kafka's own Java code can judge.

``classpath("org.apache.kafka:kafka-clients:3.9.2")`` is the one call a test needs: it downloads the artifacts
with everything they depend on, once, into ``.cache/java``. Where there is no java or no mvn, see
``tests.tools`` for what happens to the test.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.sax.saxutils import escape

from tests.tools import Missing, cached, download, program, run, skip_or_fail

# The broker and its command-line tools follow the clients by some weeks, so the two versions may differ.
KAFKA_VERSION = "4.3.1"
CLIENTS_VERSIONS = ("4.4.0", "3.9.2")

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock.tests</groupId><artifactId>jars</artifactId><version>1</version>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = (
    "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
)
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def jars(*coordinates: str, alone: bool = False) -> list[Path]:
    """The jars of ``group:artifact:version`` coordinates and all they depend on. Raises Missing.

    With ``alone`` only the jars named, for a class path that has the rest already.
    """
    program("java")
    with cached("java", *coordinates, *(("alone",) if alone else ())) as (directory, made):
        if not made:
            parts = [coordinate.split(":") for coordinate in coordinates]
            exclusions = _ALONE if alone else ""
            dependencies = "\n".join(_DEPENDENCY.format(*map(escape, part), exclusions) for part in parts)
            (directory / "pom.xml").write_text(_POM.format(dependencies=dependencies))
            copy = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
            # It remembers what a registry did not have a moment ago, except with -U.
            download(
                [program("mvn"), "-q", "-B", "-U", copy, "-DincludeScope=runtime", "-DoutputDirectory=lib"],
                cwd=directory,
            )
        found = sorted((directory / "lib").glob("*.jar"))
        assert found, f"no jars in {directory}"
        return found


def classpath(*coordinates: str) -> str:
    """What to pass to ``java -cp``. Skips the test, or fails it in CI, where it cannot be had."""
    try:
        return os.pathsep.join(map(str, jars(*coordinates)))
    except Missing as missing:
        skip_or_fail(missing)


def compiled(source: Path, class_path: str) -> Path:
    """Compile one Java source file against a class path; the directory of its classes. Raises Missing."""
    with cached("javac", source.read_bytes(), class_path) as (directory, made):
        if not made:
            run(
                [
                    program("javac"),
                    "-Xlint:all,-processing",
                    "-Werror",
                    "-cp",
                    class_path,
                    "-d",
                    directory,
                    source,
                ]
            )
        return directory


def kafka_tool(main: str, *words: str) -> str:
    """The output of one of Kafka's tools, both kinds in one."""
    class_path = classpath(
        f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
        f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
    )
    done = subprocess.run(
        [program("java"), "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", class_path, main, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr
