"""The file with the cluster's secret: what is accepted, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.network.node_secret import MECHANISM, NodeSecret
from penstock.sasl.scram import matches, salted_password
from penstock.tls.pem import TlsSettingsError

SECRET, OTHER = "s3cret-of-the-whole-cluster", "the-s3cret-that-it-had-before"
SEED = bytes(range(32))


def written(directory: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = directory / "secret"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("text", [SECRET, f"{SECRET}\n", f"\n {SECRET} \r\n{OTHER}\n\n"])
def test_one_or_two_lines_are_read(tmp_path: Path, text: str) -> None:
    secret = NodeSecret(str(written(tmp_path, text)), SEED)
    assert secret.lines == ((SECRET, OTHER) if OTHER in text else (SECRET,))
    for line, known in zip(secret.lines, secret.keys, strict=True):
        assert matches(MECHANISM, salted_password(MECHANISM, line, known.salt, known.iterations), known)
    assert SECRET not in repr(secret)


def test_what_all_nodes_derive_stays_until_the_old_secret_is_gone(tmp_path: Path) -> None:
    old, both, new = (
        NodeSecret(str(written(tmp_path, text)), bytes([number]) * 32).derived_by_all
        for number, text in enumerate((OTHER, f"{SECRET}\n{OTHER}", SECRET))
    )
    assert old == both != new, "whatever the salts of the nodes are"


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("", 0o600, "one line is expected"),
        (f"{SECRET}\n{OTHER}\n{SECRET}x", 0o600, "one line is expected"),
        ("short", 0o600, "at least 24 characters"),
        (f"{SECRET}\nshort", 0o600, "at least 24 characters"),
        (SECRET, 0o640, "chmod 600"),
        (SECRET, 0o604, "chmod 600"),
        (SECRET, 0o620, "chmod 600"),
        (SECRET + "é", 0o600, "letters, digits and punctuation only"),
        (SECRET.encode() + b"\0", 0o600, "letters, digits and punctuation only"),
        ("x" * 5000, 0o600, "larger than 4096 bytes"),
    ],
)
def test_another_file_is_refused_without_showing_it(
    tmp_path: Path, text: str | bytes, mode: int, complaint: str
) -> None:
    path = written(tmp_path, text, mode)
    with pytest.raises(TlsSettingsError, match=complaint) as refused:
        NodeSecret(str(path), SEED)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    assert "s3cret" not in str(refused.value) and "short" not in str(refused.value)


@pytest.mark.parametrize("path", ["missing", "", "a\0b"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(TlsSettingsError, match=r"penstock\.internal\.secret\.file"):
        NodeSecret(str(tmp_path / path), SEED)


def test_a_changed_file_is_used_and_a_bad_one_is_not(tmp_path: Path) -> None:
    path = written(tmp_path, SECRET)
    secret = NodeSecret(str(path), SEED)
    assert not secret.reload()
    written(tmp_path, f"{OTHER}\n{SECRET}")
    assert secret.reload() and secret.lines == (OTHER, SECRET) and secret.failure is None
    written(tmp_path, "short")
    assert not secret.reload() and secret.lines == (OTHER, SECRET)
    assert secret.failure is not None and "at least" in secret.failure
    path.unlink()
    assert not secret.reload() and secret.lines == (OTHER, SECRET)
    written(tmp_path, OTHER)
    assert secret.reload() and secret.lines == (OTHER,) and secret.failure is None


def test_what_was_derived_is_kept_until_the_secret_changes(tmp_path: Path) -> None:
    secret = NodeSecret(str(written(tmp_path, SECRET)), SEED)
    assert secret.derived(SECRET, b"salt", 4096) is None
    secret.keep(SECRET, b"salt", 4096, b"salted")
    assert secret.derived(SECRET, b"salt", 4096) == b"salted"
    written(tmp_path, OTHER)
    assert secret.reload() and secret.derived(SECRET, b"salt", 4096) is None
