"""The asyncio client: any of ``calls``, and decoded records, on one connection per broker and kind of request.

Each call is retried across leader changes, broker deaths and reconnects until its deadline. A caller that is
cancelled costs nothing more: what is in flight for it is dropped when it comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

from penstock.model import TopicPartition
from penstock.sasl.settings import TokenSource
from penstock.tls.settings import TlsSettings
from penstock.wire import calls
from penstock.wire.async_shell import AsyncShell
from penstock.wire.calls import Call
from penstock.wire.polling import FetchSettings, Polling
from penstock.wire.record_batches import FetchedRecords, decode_fetched
from penstock.wire.security import Security
from penstock.wire.shells import ShellSettings

Result = TypeVar("Result")

FETCH_BYTES = 1024 * 1024
FETCH_WAIT_MS = 500


class AsyncClient:
    """Made and used in one running loop. Any call may raise a ``WireError``, which has a message of one line.

    ``async with AsyncClient("127.0.0.1:9092") as client: await client.do(calls.topics())``
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "penstock-wire",
        request_timeout_ms: int = 30_000,
        deadline_ms: int = 120_000,
        security: Mapping[str, str] | Security | TlsSettings | None = None,
        token: TokenSource | None = None,
    ) -> None:
        """The arguments are those of ``Client``. ``token`` is called in the loop, so it must not wait.

        Raises BadBootstrap and BadSecurity.
        """
        self.bootstrap = bootstrap
        self.shell = AsyncShell(
            ShellSettings.of(bootstrap, client_id, request_timeout_ms, deadline_ms, security, token)
        )
        self._polling = Polling(self.shell.core)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def do(self, call: Call[Result], *, deadline_ms: int | None = None) -> Result:
        """Do any of ``calls``, within ``deadline_ms`` or the client's deadline."""
        shell = self.shell
        shell.check_usable()
        return await shell.wait(shell.core.start(call.what, call.steps, shell.now_ms(), deadline_ms))

    async def fetch(
        self,
        at: TopicPartition,
        offset: int,
        *,
        bytes_max: int = FETCH_BYTES,
        wait_ms: int = FETCH_WAIT_MS,
        read_committed: bool = False,
        topic_id: bytes | None = None,
        deadline_ms: int | None = None,
    ) -> FetchedRecords:
        """Records from ``offset`` on. At the end of the log it waits for records, for ``wait_ms`` at most.

        There may be progress without records: go on at ``next_offset``. With a ``topic_id`` only that topic is
        read, not another one of the same name.

        Raises:
            OffsetOutOfRange: the log begins later or ends earlier.
            UnknownTopic: there is no such topic or partition; ``TopicReplaced``: the name is now another topic's.
            CorruptBatch: the records are damaged.
        """
        settings = FetchSettings(bytes_max, wait_ms, 1, read_committed)
        call = calls.fetch(at, offset, settings, topic_id, self._polling)
        return decode_fetched(await self.do(call, deadline_ms=deadline_ms), offset)

    async def close(self) -> None:
        await self.shell.close()
