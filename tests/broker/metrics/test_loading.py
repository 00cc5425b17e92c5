"""A broker without metrics does not pay for them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from penstock.broker import node, process
from penstock.broker.handlers import routes
from penstock.cli import serve
print(*[name for name in sys.modules if name.split(".")[0] in ("h11", "prometheus_client") or ".metrics" in name])
"""


def test_a_broker_without_metrics_loads_nothing_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
