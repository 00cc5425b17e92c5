"""The real doors outside, where the simulated ones cannot stand in for them."""

from __future__ import annotations

import asyncio

import pytest

from penstock.environment import Stream
from penstock.machine import MachineNetwork


@pytest.mark.parametrize("host", ["kafka..example", "x" * 300, "a\0b", ""])
def test_what_cannot_be_a_host_is_a_host_that_cannot_be_reached(host: str) -> None:
    """Nodes tell each other where they listen; whatever one of them says, the others go on."""

    async def connect() -> tuple[Stream | None, OSError | None]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[tuple[Stream | None, OSError | None]] = loop.create_future()
        MachineNetwork(loop).connect(host, 1, lambda *answer: answered.set_result(answer))
        return await answered

    stream, error = asyncio.run(connect())

    assert stream is None
    assert isinstance(error, OSError)
