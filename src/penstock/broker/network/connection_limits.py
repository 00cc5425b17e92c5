"""How many connections a listener takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConnectionLimits:
    """The settings can be changed while the broker runs, so listeners look here at every new connection."""

    total: int
    # From one host.
    per_address: int
