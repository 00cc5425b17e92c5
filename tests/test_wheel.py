"""What users install: the wheel is complete, and works in an environment that has nothing but what it asks for.

The environment is empty at first. Of the libraries on this machine it then sees the ones that the wheel's own
metadata names, so a dependency that is missing from pyproject.toml is missing here too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from tests.support import BrokerProcess
from tests.tools import ROOT, Missing, cached, download, skip_or_fail

# Besides the package itself.
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
RUN_TIMEOUT_S = 240

READ_WITH_SPARK = """
import json, sys
import penstock.spark

bootstrap, scratch = sys.argv[1:]
spark = penstock.spark.session(
    "wheel", "local[1]", **{"spark.ui.enabled": "false", "spark.local.dir": scratch, "spark.driver.memory": "512m"}
)
rows = (
    spark.read.format("penstock").option("bootstrap", bootstrap).option("subscribe", "orders").load()
    .selectExpr("cast(key as string)", "cast(value as string)").collect()
)
spark.stop()
print(json.dumps({"package": penstock.__file__, "rows": sorted(map(list, rows))}))
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that the wheel was installed into."""

    directory: Path

    def command(self, *words: str) -> list[str]:
        """A program of the environment. The checkout's own package, which tests run on, is out of its sight."""
        program, *arguments = words
        unset = [word for name in ("PYTHONPATH", "PYTHONHOME", "SPARK_HOME") for word in ("-u", name)]
        return ["env", *unset, str(self.directory / "bin" / program), *arguments]

    def run(self, *words: str, given: str = "") -> str:
        done = subprocess.run(
            self.command(*words),
            cwd=self.directory,
            input=given,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def show(self, *distributions: str) -> None:
        """Let it import these distributions of the tests' own environment, and nothing else of it."""
        shown = self.directory / "shown"
        shown.mkdir(exist_ok=True)
        for name in distributions:
            found = distribution(name)
            tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
            for top in tops:
                if not (shown / top).exists():
                    (shown / top).symlink_to(Path(str(found.locate_file(top))).resolve())
        packages = sysconfig.get_path("purelib", vars={"base": str(self.directory)})
        (Path(packages) / "shown.pth").write_text(f"{shown}\n")


class InstalledBroker(BrokerProcess):
    """A broker that runs from the wheel."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self._environment = environment

    def command(self) -> list[str]:
        words = super().command()
        return self._environment.command("penstock", *words[words.index("serve") :])


def package_files() -> set[str]:
    """What belongs to the package, below src. Compiled modules are made by the installation."""
    return {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyd")
    }


def requirements(metadata: Message, extra: str = "") -> list[str]:
    """The distributions that an installation with ``extra`` brings, and those which they bring."""
    waiting = [(line, extra) for line in metadata.get_all("Requires-Dist", [])]
    found: dict[tuple[str, str], None] = {}
    while waiting:
        line, asked = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": asked}):
            continue
        for each in ("", *requirement.extras):
            if (requirement.name, each) not in found:
                found[requirement.name, each] = None
                waiting += [(line, each) for line in distribution(requirement.name).requires or ()]
    return sorted({name for name, _ in found})


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Built as ``make wheel`` does it, the wheel from the sdist, without leaving anything in the checkout."""
    files = [*BUILT_FROM, *(f"src/{name}" for name in sorted(package_files()))]
    inputs = [name.encode() + b"\0" + (ROOT / name).read_bytes() for name in files]
    try:
        with cached("wheel", sys.version, *inputs) as (directory, made):
            if not made:
                for name in files:
                    copy = directory / "tree" / name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy)
                download([sys.executable, "-m", "build", "--outdir", directory, directory / "tree"])
                shutil.rmtree(directory / "tree")
            (built,) = directory.glob("*.whl")
            return built
    except Missing as missing:
        skip_or_fail(missing)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(
    wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    directory = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(directory, symlinks=True)
    environment = Environment(directory)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run(
        [*pip, "--python", directory / "bin" / "python", "install", "--no-deps", "--no-index", wheel],
        check=True,
        timeout=RUN_TIMEOUT_S,
    )
    environment.show(*requirements(metadata))
    yield environment
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def orders(environment: Environment) -> Iterator[InstalledBroker]:
    """A broker from the wheel with three records in the topic orders, which the wheel's command line put there."""
    with InstalledBroker(environment) as broker:
        where = ("--bootstrap", broker.bootstrap)
        environment.run("penstock", "topics", "create", "orders", "--partitions", "1", *where)
        environment.run(
            "penstock", "produce", "orders", "--key-separator", ":", *where, given="a:1\nb:2\nc:3\n"
        )
        yield broker


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in held if name.endswith((".so", ".pyd"))}
    assert held - compiled == package_files()


def test_modules_with_c_types_are_compiled_where_there_is_a_compiler(wheel: Path) -> None:
    if not shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]):
        pytest.skip("no C compiler here")
    with zipfile.ZipFile(wheel) as archive:
        compiled = {name for name in archive.namelist() if name.endswith((".so", ".pyd"))}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    typed = {name for name in package_files() if name.endswith(".pxd")}
    assert typed
    assert compiled == {name.removesuffix(".pxd") + suffix for name in typed}


def test_the_distribution_has_a_name_of_its_own(metadata: Message) -> None:
    # The penstock of PyPI is another project.
    assert metadata["Name"] == "penstock-mq"
    assert metadata["Version"] == penstock.__version__
    assert {"spark", "delta", "iceberg"} <= set(metadata.get_all("Provides-Extra", []))


def test_a_broker_and_the_command_line_run_from_the_wheel(
    environment: Environment, orders: InstalledBroker
) -> None:
    where = ("--bootstrap", orders.bootstrap)
    assert environment.run("penstock", "--version") == f"penstock {penstock.__version__}\n"
    read = environment.run("penstock", "consume", "orders", "--keys", "--no-follow", "--json", *where)
    assert [(record["key"], record["value"]) for record in map(json.loads, read.splitlines())] == [
        ("a", "1"),
        ("b", "2"),
        ("c", "3"),
    ]


def test_spark_reads_a_topic_from_the_wheel(
    environment: Environment, orders: InstalledBroker, metadata: Message, tmp_path: Path
) -> None:
    # Without the extra there is no Spark, and the command says what to install.
    asked = environment.command("penstock", "spark", "profile", "orders", "--to", str(tmp_path / "profile"))
    without = subprocess.run(
        [*asked, "--bootstrap", orders.bootstrap], capture_output=True, text=True, check=False
    )
    assert (without.returncode, without.stderr) == (
        1,
        "penstock: pyspark is not installed; run pip install 'penstock-mq[spark]'\n",
    )
    environment.show(*requirements(metadata, "spark"))
    last = environment.run("python", "-c", READ_WITH_SPARK, orders.bootstrap, str(tmp_path)).splitlines()[-1]
    told = json.loads(last)
    assert Path(told["package"]).is_relative_to(environment.directory)
    assert told["rows"] == [["a", "1"], ["b", "2"], ["c", "3"]]
    assert not os.listdir(tmp_path)
