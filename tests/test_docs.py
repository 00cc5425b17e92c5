"""The pages that are made from the code say what the code says, links lead somewhere, and the architecture's page
names what there is."""

from __future__ import annotations

import ast
import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "penstock"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_reference_pages_are_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None and specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        written = (ROOT / "docs" / "reference" / name).read_text()
        assert written == page(), f"docs/reference/{name} is out of date: run python docs/generate.py"


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def mapped() -> set[str]:
    """What the file map names, as paths below the package; in a row a bare name is in the folder named before."""
    rows = re.findall(r"^\| (`.+?`) \|", ARCHITECTURE.partition("## File map")[2], re.MULTILINE)
    found = set()
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            if "/" in name.rstrip("/"):
                folder = name.rpartition("/")[0] + "/"
                found.add(name)
            else:
                found.add(folder + name)
    return found


def test_every_module_is_in_the_file_map() -> None:
    # A name that ends in a slash stands for all that is in the folder.
    patterns = [name + "*" if name.endswith("/") else name for name in mapped()]
    modules = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("[!_]*.py")}
    unnamed = {module for module in modules if not any(fnmatch(module, pattern) for pattern in patterns)}
    assert unnamed == set(), "name them in the file map of ARCHITECTURE.md"


def test_the_file_map_names_nothing_that_is_not_there() -> None:
    missing = {name for name in mapped() if not any(SOURCE.glob(name)) and not any(ROOT.glob(name))}
    assert missing == set()


def test_every_method_that_the_architecture_names_is_there() -> None:
    members: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                inside = members.setdefault(node.name, set())
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef):
                        inside.add(each.name)
                    elif isinstance(each, ast.Attribute):
                        inside.add(each.attr)
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", ARCHITECTURE)
    assert len(named) > 20
    assert [f"{owner}.{name}" for owner, name in named if name not in members.get(owner, ())] == []
