"""`python -m penstock` is the `penstock` command."""

import sys

from penstock.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
