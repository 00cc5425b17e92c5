"""The connection limits of a broker, or of the internal listener of a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConnectionLimits:
    """The settings can change while the broker runs, so servers read them at every new connection."""

    total: int
    # From one host.
    per_address: int
