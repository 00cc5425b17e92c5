"""What the broker says about itself may reach nobody."""

from __future__ import annotations

import os
import subprocess
import sys

TWO_LINES = """
from penstock.broker.logs import Logger
logger = Logger(node=1)
logger.warning("first")
try:
    raise ValueError("ours")
except ValueError:
    logger.exception("second")
print("alive")
"""


def test_a_line_that_cannot_be_written_is_lost_and_not_the_broker() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TWO_LINES],
            stdout=subprocess.PIPE,
            stderr=write_end,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stdout) == (0, "alive\n")
