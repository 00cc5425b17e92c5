"""The connection limits of a listener."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConnectionLimits:
    """The settings can change while the broker runs, so listeners read them at every new connection."""

    total: int
    # From one host.
    per_address: int
