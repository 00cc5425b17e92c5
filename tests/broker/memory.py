"""How much memory a broker process holds, and held at the most: what Linux says of it."""

from __future__ import annotations

import re
from pathlib import Path

MEGABYTE = 1 << 20

_field = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def resident_bytes(pid: int) -> int:
    return _status(pid)["VmRSS"]


def peak_bytes(pid: int) -> int:
    """The most it has held since ``forget_peak``."""
    return _status(pid)["VmHWM"]


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _status(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(kilobytes) * 1024 for name, kilobytes in _field.findall(status)}
