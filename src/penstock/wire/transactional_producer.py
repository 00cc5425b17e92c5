"""The blocking transactional producer: batches and consumed offsets that become visible together or not at all.

    producer = TransactionalProducer(client, "orders-etl-3")
    producer.init()
    with producer.transaction():
        producer.send(at, batch)
        producer.send_offsets("orders-etl", {source: next_offset})

It speaks the generation of transactions that the cluster offers. Of all producers with one transactional id only
the last one that called ``init`` may write: the others meet ``ProducerFenced``. Any other error while a transaction
is open spoils only that transaction: ``abort``, then ``begin`` again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from penstock.model import TopicPartition
from penstock.wire.client import Client
from penstock.wire.core import Core, Steps, Task
from penstock.wire.errors import ProducerFenced, WireError
from penstock.wire.producer import UNACKNOWLEDGED_BYTES_MAX
from penstock.wire.sequences import IN_FLIGHT_MAX, OnAck
from penstock.wire.transacting import State, Transacting
from penstock.wire.transactions import NO_MEMBER, GroupMember

# As in Kafka's clients. Brokers refuse more than transaction.max.timeout.ms, 15 minutes by default.
TIMEOUT_MS = 60_000


class TransactionalProducer:
    """A producer on a client's connections. Acknowledgements are always those of all replicas in sync."""

    def __init__(
        self,
        client: Client,
        transactional_id: str,
        *,
        timeout_ms: int = TIMEOUT_MS,
        in_flight: int = IN_FLIGHT_MAX,
    ) -> None:
        if not transactional_id:
            raise ValueError("a transactional id must not be empty")
        if timeout_ms < 1:
            raise ValueError(f"timeout_ms={timeout_ms}: a transaction needs time; give milliseconds above 0")
        if not 1 <= in_flight <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight={in_flight}: a broker remembers 5 batches, so it must be 1 to 5")
        self._client = client
        self._shell = client.shell
        with client.lock:
            self._transacting = Transacting(
                client.shell.core, transactional_id, timeout_ms=timeout_ms, in_flight=in_flight
            )
        self._producing = self._transacting.producing

    def __enter__(self) -> TransactionalProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def transactional_id(self) -> str:
        return self._transacting.transactional_id

    def init(self) -> None:
        """Become the only producer of the transactional id. An unfinished transaction of it is ended first.

        Raises:
            BrokerRefused: the broker does not allow this id or timeout. Any other error: call it again.
        """
        self._do("initialising", self._transacting.init)

    def begin(self) -> None:
        """Begin a transaction. Sends nothing yet."""
        with self._client.lock:
            self._transacting.begin()

    def send(self, at: TopicPartition, batch: bytearray, on_ack: OnAck | None = None) -> None:
        """Send one record batch in the open transaction, as ``Producer.send``.

        Raises:
            ProducerFenced: this producer can do nothing any more. Any other error: abort the transaction.
        """
        with self._client.lock:
            self._transacting.add(at, batch, on_ack, self._shell.now_ms())
            self._shell.turn(block=False)
            self._report()
            while self._producing.unacknowledged_bytes > UNACKNOWLEDGED_BYTES_MAX:
                self._shell.turn()
                self._report()

    def flush(self) -> None:
        """Wait until everything is acknowledged; that does not commit it. Raises as ``send``."""
        with self._client.lock:
            self._report()
            while self._producing.unacknowledged:
                self._shell.turn()
                self._report()

    def send_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int], *, member: GroupMember = NO_MEMBER
    ) -> None:
        """Commit a group's offsets with the transaction. Each is the next offset to read.

        With ``member`` the group's coordinator refuses the offsets of a member that has lost its partitions.
        Raises as ``send``.
        """
        wanted = dict(offsets)
        transacting = self._transacting
        if not wanted:
            return
        try:
            self._do(
                f"sending offsets of group {group}",
                lambda core, task: transacting.send_offsets(core, task, group, wanted, member),
            )
        except WireError as error:
            with self._client.lock:
                transacting.spoil(error)
            raise

    def commit(self) -> None:
        """Wait until everything is acknowledged, then make it visible.

        Raises:
            TimedOut, Unreachable: the outcome is unknown; call it again.
            ProducerFenced: nothing of the transaction is visible, and this producer can do nothing any more.
            Any other error: nothing is visible yet; abort the transaction.
        """
        with self._client.lock:
            if self._transacting.state is State.OPEN:
                self.flush()
            self._do("committing", self._transacting.commit)

    def abort(self) -> None:
        """Drop everything that was sent in the transaction. After TimedOut or Unreachable call it again."""
        with self._client.lock:
            self._transacting.give_up()
            while self._producing.has_requests:
                self._shell.turn()
            self._do("aborting", self._transacting.abort)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin a transaction; commit it at the end of the block, or abort it after an exception."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            # A commit whose outcome is unknown must not become an abort.
            if self._transacting.state in (State.OPEN, State.ABORTING):
                with suppress(WireError):
                    self.abort()
            raise

    def close(self) -> None:
        """Abort the open transaction if there is one, as far as a broker can be reached."""
        with self._client.lock:
            if self._transacting.state in (State.OPEN, State.ABORTING) and not self._shell.is_closed:
                with suppress(WireError):
                    self.abort()
            self._transacting.close()

    # Private

    def _do(self, what: str, steps: Callable[[Core, Task[Any]], Steps[None]]) -> None:
        name = f"{what} the transaction of {self.transactional_id}"
        with self._client.lock:
            self._shell.turn(block=False)
            self._shell.wait(self._shell.core.start(name, steps, self._shell.now_ms()))

    def _report(self) -> None:
        """Run the callbacks of acknowledged batches, and raise the transaction's error if there is one."""
        acked, self._producing.acked = self._producing.acked, []
        for on_ack, base_offset in acked:
            on_ack(base_offset)
        error = self._transacting.error
        if isinstance(error, ProducerFenced):
            self._transacting.spoil(error)
        if error is not None:
            raise error
