"""The pages that are made from the code say what the code says, links lead somewhere, and the architecture's page
names what there is and draws the imports as they are."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
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


def test_every_file_that_the_architecture_names_is_there() -> None:
    paths = set(re.findall(r"`([a-z_]+/[\w/]*(?:\.py|/))`", ARCHITECTURE.partition("## File map")[0]))
    assert len(paths) > 40
    assert [
        path for path in sorted(paths) if not (SOURCE / path).exists() and not (ROOT / path).exists()
    ] == []


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


def drawn() -> tuple[str, str]:
    """The diagrams of imports: of the package, and of the broker."""
    blocks = re.findall(
        r"^```text\n(.*?)^```", ARCHITECTURE.partition("### Rooms and imports")[2], re.MULTILINE | re.DOTALL
    )
    return blocks[0], blocks[1]


def contract(name: str) -> list[list[str]]:
    """The layers of an import contract, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [each for each in settings["contracts"] if each["name"] == name]
    return [[module.removeprefix("penstock.") for module in layer.split(" | ")] for layer in found["layers"]]


def test_the_diagram_of_the_package_is_its_import_contract() -> None:
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in drawn()[0].splitlines()]
    assert [line.split(" | ") for line in lines if line != "|"] == contract("Imports go downward only")


ROOMS = contract("Rooms of the broker import rooms below them")[:-1]
USED_EVERYWHERE = contract("Rooms of the broker import rooms below them")[-1]


def imported_rooms() -> dict[str, set[str]]:
    """What each room of the broker imports, from the top down."""
    found: dict[str, set[str]] = {room: set() for layer in ROOMS for room in layer}
    for path in (SOURCE / "broker").rglob("*.py"):
        room = path.relative_to(SOURCE / "broker").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.broker."):
                found.get(room, set()).add(str(node.module).split(".")[2])
    return {room: imported - {room, *USED_EVERYWHERE} for room, imported in found.items()}


def test_the_diagram_of_the_broker_has_its_rooms_from_the_top_and_what_they_import() -> None:
    picture = re.findall(r"^ +(\w+) +->((?: |\n {20,}|\w)*)", drawn()[1], re.MULTILINE)
    assert [(room, set(names.split())) for room, names in picture] == list(imported_rooms().items())
    order = [room for room, _ in picture]
    assert all(names.split() == sorted(names.split(), key=order.index) for _, names in picture)


def test_each_room_of_the_broker_says_what_it_imports() -> None:
    for room, imported in imported_rooms().items():
        package = SOURCE / "broker" / room / "__init__.py"
        if package.exists() and room != "handlers":  # which may import everything below them
            named = set(re.findall(r"``(\w+)``", package.read_text()))
            assert imported <= named, f"broker/{room}/__init__.py does not name {imported - named}"


# A file, and what is named in it: `tests/tls/test_floods.py::test_name`.
NAMED_TEST = re.compile(r"`((?:[\w./-]+/)?\w+\.py)((?:::\w+)+)`")


def test_every_test_that_the_specification_page_names_is_there() -> None:
    named = NAMED_TEST.findall((ROOT / "docs" / "reference" / "specification.md").read_text())
    assert named
    for file, names in named:
        places = (ROOT / file, ROOT / "tests" / "interop" / file, ROOT / "tests" / "cli" / file)
        (text,) = [place.read_text() for place in places if place.is_file()]
        for name in names.split("::")[1:]:
            assert re.search(rf"(?:def|class) {name}\b", text), f"{file}: {name}"
