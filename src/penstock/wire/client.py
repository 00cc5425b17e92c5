"""The blocking client: one method per operation, each retried across leader changes, broker deaths and reconnects
until the deadline.

``shared`` returns this process's one client for given settings, so that Spark's reused workers keep their
connections and metadata. It is thread-safe (calls take turns) and safe after a fork: the child gets its own
client.

Careful: records are a view of a buffer that is reused as soon as it has no views. Keep the view or the decoded
data, never an address.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from penstock.model import TopicPartition
from penstock.sasl.settings import TokenSource
from penstock.tls.settings import TlsSettings
from penstock.wire import calls, log_dirs
from penstock.wire.blocking import Shell
from penstock.wire.calls import Call
from penstock.wire.cluster import TopicInfo
from penstock.wire.core import Task
from penstock.wire.errors import TimedOut
from penstock.wire.operations import Fetched, OffsetAt
from penstock.wire.polling import FetchSettings
from penstock.wire.security import Security
from penstock.wire.shells import ShellSettings
from penstock.wire.transaction_admin import (
    DescribedTransaction,
    ListedTransaction,
    ListFilter,
    PartitionProducer,
)

FETCH_BYTES = 8 * 1024 * 1024
FETCH_WAIT_MS = 500

Result = TypeVar("Result")


class Client:
    """Any call may raise a ``WireError``, which is final and has a message of one line."""

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
        """``security`` has librdkafka's names: ``{"security.protocol": "ssl", "ssl.ca.location": "ca.pem"}``.

        From other names one makes ``Security``. Files are read now. ``token`` is for OAUTHBEARER: it returns a
        token, and is called for each connection. Raises BadBootstrap and BadSecurity.
        """
        settings = ShellSettings.of(bootstrap, client_id, request_timeout_ms, deadline_ms, security, token)
        self.bootstrap = bootstrap
        # Reentrant: a producer's callbacks may call the client.
        self.lock = threading.RLock()
        self.shell = Shell(settings)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def do(self, call: Call[Result]) -> Result:
        """Do any of ``calls``. The methods below are shorter ways to say the same."""
        with self.lock:
            # Process events since the last call: connections may have ended.
            self.shell.turn(block=False)
            return self.shell.wait(self.shell.core.start(call.what, call.steps, self.shell.now_ms()))

    # Reading

    def topics(self, names: Iterable[str] | None = None, *, create: bool = False) -> dict[str, TopicInfo]:
        return self.do(calls.topics(names, create=create))

    def list_offsets(
        self, wanted: Mapping[TopicPartition, int], *, read_committed: bool = False
    ) -> dict[TopicPartition, OffsetAt]:
        return self.do(calls.list_offsets(wanted, read_committed=read_committed))

    def fetch(
        self,
        at: TopicPartition,
        offset: int,
        *,
        bytes_max: int = FETCH_BYTES,
        wait_ms: int = FETCH_WAIT_MS,
        bytes_min: int = 1,
        read_committed: bool = False,
    ) -> Fetched:
        """Batches from ``offset`` on; none when nothing arrived within ``wait_ms``.

        Raises:
            OffsetOutOfRange: the log begins later or ends earlier.
            UnknownTopic: there is no such topic or partition.
        """
        settings = FetchSettings(bytes_max, wait_ms, bytes_min, read_committed)
        with self.lock:
            return self.shell.wait(self._fetching(at, offset, settings, None))

    def reader(
        self,
        at: TopicPartition,
        offset: int,
        end: int,
        *,
        bytes_max: int = FETCH_BYTES,
        wait_ms: int = FETCH_WAIT_MS,
        read_committed: bool = False,
        topic_id: bytes | None = None,
    ) -> Iterator[Fetched]:
        """Batches from ``offset`` until ``end`` (exclusive) is reached; the last may go beyond it.

        The next fetch runs while the caller processes this one. All batches are of one topic: the one with
        ``topic_id``, or the one found first.

        Raises:
            OffsetOutOfRange: the log begins later or ends earlier.
            UnknownTopic: there is no such topic or partition; ``TopicReplaced``: the name is now another topic's.
            TimedOut: the log did not grow to ``end`` before the deadline.
        """
        settings = FetchSettings(bytes_max, wait_ms, 1, read_committed)
        task: Task[Fetched] | None = None
        try:
            with self.lock:
                progress_ms = self.shell.now_ms()
                if offset < end:
                    task = self._fetching(at, offset, settings, topic_id)
            while task is not None:
                with self.lock:
                    fetched = self.shell.wait(task)
                    topic_id = fetched.topic_id
                    task = None
                    now_ms = self.shell.now_ms()
                    if fetched.next_offset > offset:
                        offset, progress_ms = fetched.next_offset, now_ms
                    elif now_ms - progress_ms > self.shell.core.deadline_ms:
                        raise TimedOut(
                            f"reading {at} up to {end}, but it has ended at {offset} for "
                            f"{self.shell.core.deadline_ms / 1000:g} s; was its log truncated?"
                        )
                    if offset < end:
                        task = self._fetching(at, offset, settings, topic_id)
                if len(fetched.records):
                    yield fetched
                    progress_ms = self.shell.now_ms()
                # Frees the buffer for a later response, unless the caller kept the view.
                del fetched
        finally:
            if task is not None:
                self.shell.given_up.append(task)

    # Groups

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, metadata: str = "") -> None:
        """Commit offsets to a group without members, for tools that show lag."""
        self.do(calls.commit(group, offsets, metadata=metadata))

    def committed(self, group: str, wanted: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self.do(calls.committed(group, wanted))

    # Topics

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        replication: int = -1,
        configs: Mapping[str, str] | None = None,
    ) -> bool:
        return self.do(calls.create_topic(name, partitions, replication, configs))

    def topic_configs(self, names: Iterable[str]) -> dict[str, dict[str, str | None]]:
        return self.do(calls.topic_configs(names))

    def replicas(self, partitions: Iterable[TopicPartition] | None = None) -> list[log_dirs.Replica]:
        return self.do(calls.replicas(partitions))

    # Transactions, for operators

    def list_transactions(self, wanted: ListFilter | None = None) -> list[ListedTransaction]:
        return self.do(calls.list_transactions(wanted))

    def describe_transaction(self, transactional_id: str) -> DescribedTransaction | None:
        return self.do(calls.describe_transaction(transactional_id))

    def partition_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[PartitionProducer]]:
        return self.do(calls.partition_producers(partitions))

    def abort_in_partition(self, at: TopicPartition, producer: PartitionProducer) -> None:
        self.do(calls.abort_in_partition(at, producer))

    def close(self) -> None:
        with self.lock:
            self.shell.close()

    # Private

    def _fetching(
        self, at: TopicPartition, offset: int, settings: FetchSettings, topic_id: bytes | None
    ) -> Task[Fetched]:
        """Start a fetch; its request has been sent when this returns."""
        self.shell.turn(block=False)
        call = calls.fetch(at, offset, settings, topic_id)
        task = self.shell.core.start(call.what, call.steps, self.shell.now_ms())
        self.shell.turn(block=False)
        return task


# One client per set of ``shared`` arguments in this process.
_clients: dict[tuple[Any, ...], Client] = {}
_clients_lock = threading.Lock()
# Clients of the parent process before a fork. Kept but unused: closing them would disturb the parent.
_inherited: list[Client] = []


def shared(bootstrap: str, **settings: Any) -> Client:
    """This process's client for these settings (see ``Client``). Do not close it."""
    security = settings.pop("security", None) or {}
    marks = tuple(sorted(security.items())) if isinstance(security, Mapping) else security
    key = (bootstrap, *sorted(settings.items()), marks)
    with _clients_lock:
        client = _clients.get(key)
        if client is None or client.shell.is_closed:
            client = _clients[key] = Client(bootstrap, **settings, security=security)
        return client


def _close_shared() -> None:
    for client in _clients.values():
        client.close()


def _forked() -> None:
    global _clients_lock  # noqa: PLW0603  (another thread may have held it)
    _clients_lock = threading.Lock()
    _inherited.extend(_clients.values())
    _clients.clear()


os.register_at_fork(after_in_child=_forked)
atexit.register(_close_shared)
