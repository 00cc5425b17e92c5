"""Rules that no type checker knows: everything of the world comes through the ports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
# The real doors, and the commands of people and jobs of Spark, which run on a real machine by nature.
OUTSIDE = {"machine.py", "machine_processes.py", "job_process.py", "cli", "spark", "__main__.py"}
FORBIDDEN_MODULES = {
    "asyncio", "datetime", "multiprocessing", "secrets", "select", "selectors", "socket", "subprocess",
    "threading", "time", "uuid", "uvloop",
}  # fmt: skip
FORBIDDEN_CALLS = {"open", "input"}
# os.path is arithmetic on names; the rest of os is the world.
ALLOWED_OF_OS = {"path"}
# The process itself: signals, the loop, standard output; the blocking and the asyncio client around their core, and
# the samples that are taken with them; certificates, which OpenSSL reads from files; the keys of tokens, which a
# library reads from URLs; and the names of hosts, which are looked up before anything starts.
PROCESS = {
    "addresses.py",
    "broker/process.py", "broker/logs.py", "broker/config.py", "monitoring/alerts.py",
    "monitoring/collecting.py", "sasl/key_sets.py", "tls/pem.py",
    "tls/private_file.py", "wire/async_client.py", "wire/async_member.py", "wire/async_producer.py",
    "wire/async_shell.py", "wire/blocking.py", "wire/client.py", "wire/shells.py",
}  # fmt: skip


def sources() -> list[Path]:
    inside = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in OUTSIDE]
    assert len(inside) > 40
    return inside


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_world_is_reached_only_through_the_ports(path: Path) -> None:
    name = str(path.relative_to(SOURCE))
    tree = ast.parse(path.read_text())
    offences = []
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not _is_plain_uuid(node):
            modules = [node.module]
        offences += [f"imports {module}" for module in modules if module.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr not in ALLOWED_OF_OS:
                offences.append(f"uses os.{node.attr}")
            if node.value.id == "random" and node.attr not in ("Random",):
                offences.append(f"uses random.{node.attr}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            offences.append(f"calls {node.func.id}()")
    if name in PROCESS:
        return
    assert not offences, f"{name}: {', '.join(offences)}"


def _is_plain_uuid(node: ast.ImportFrom) -> bool:
    """A UUID made of given bits is a value; uuid1() and uuid4() ask the machine."""
    return node.module == "uuid" and all(alias.name == "UUID" for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_set_is_iterated_where_a_seed_must_mean_something(path: Path) -> None:
    """The order of a set of texts differs from process to process; a run must be repeatable from its seed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Set | ast.SetComp):
            raise AssertionError(f"{path.name}:{node.iter.lineno} iterates a set")
