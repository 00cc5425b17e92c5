from __future__ import annotations

import io

import pytest

from penstock.cli.failures import Failure
from penstock.cli.output import bytes_text, confirm, count_text, show_table


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_into_a_pipe_a_table_is_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("TOPIC", "PARTITIONS"), [("orders", 12), ("a-much-longer-name", None)], title="topics")
    assert capsys.readouterr().out == (
        "topics\n"
        "TOPIC               PARTITIONS\n"
        "orders                      12\n"
        "a-much-longer-name           -\n"
    )


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    # Any client may choose such a name, and none may draw a row or change the colour of an operator's terminal.
    show_table(("ID",), [("a\nfalse row",), ("\x1b[31mred",), ("größe",)], title="of \x07")
    assert capsys.readouterr().out == "of \\x07\nID\na\\nfalse row\n\\x1b[31mred\ngröße\n"


def test_a_table_without_rows_keeps_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("TOPIC", "PARTITIONS"), [])
    assert capsys.readouterr().out == "TOPIC  PARTITIONS\n"


def test_into_a_pipe_a_wide_row_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("KEY",), [("x" * 500,)])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_on_a_terminal_a_table_is_drawn_and_markup_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    show_table(("TOPIC", "PARTITIONS"), [("[red]orders[/red]", 12)])
    drawn = terminal.getvalue()
    assert "[red]orders[/red]" in drawn
    assert "─" in drawn


def drawn(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, str], shorten: bool = False) -> list[str]:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    show_table(("ID", "ADDRESS"), rows, shorten=shorten)
    return terminal.getvalue().splitlines()


def test_on_a_narrow_terminal_an_address_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "broker-with-a-long-name.example.org:9092"
    lines = drawn(monkeypatch, ("1", address), ("2", address))
    assert [line.split() for line in lines if address in line] == [["1", address], ["2", address]]


def test_on_a_narrow_terminal_rows_of_records_are_cut_to_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch, ("1", "a" * 100), ("2", "b" * 100), shorten=True)
    rows = [line for line in lines if line.strip()[:1] in {"1", "2"}]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all(row.rstrip().endswith("…") and len(row) <= 40 for row in rows)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999.6, "1 KB"),
        (1_000, "1 KB"),
        (1_234, "1.23 KB"),
        (12_345, "12.3 KB"),
        (258e12, "258 TB"),
        (86.4e12, "86.4 TB"),
        (7.74e15, "7.74 PB"),
        (999_950, "1 MB"),
        (5e21, "5000 EB"),
    ],
)
def test_bytes_are_shown_in_three_digits(amount: float, text: str) -> None:
    assert bytes_text(amount) == text


def test_one_is_not_plural() -> None:
    assert [count_text(count, "record") for count in (0, 1, 2)] == ["0 records", "1 record", "2 records"]


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_yes_goes_ahead(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal(answer))
    confirm("Delete it?", yes=False)


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "yessir\n"])
def test_anything_else_does_nothing(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal(answer))
    with pytest.raises(Failure, match="nothing was done"):
        confirm("Delete it?", yes=False)


def test_without_a_terminal_only_the_option_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(Failure, match="pass --yes"):
        confirm("Delete it?", yes=False)
    confirm("Delete it?", yes=True)
