"""The blocking producer: sends batches in order and exactly once, and reports acknowledgements.

It sends while the caller makes the next batch, as far as that works without a thread: each ``send`` turns the shell
once, and waits only when too much is unacknowledged. An error is final, because records after a lost batch must not
be written: the call that meets it and every later call raise it.
"""

from __future__ import annotations

from types import TracebackType

from penstock.model import TopicPartition
from penstock.wire.client import Client
from penstock.wire.producing import Producing
from penstock.wire.sequences import IN_FLIGHT_MAX, OnAck

# ``send`` waits while more bytes than this are unacknowledged.
UNACKNOWLEDGED_BYTES_MAX = 32 * 1024 * 1024
ALL = -1


class Producer:
    """An idempotent producer on a client's connections. A client may have several.

    ``acks=-1`` waits for all replicas in sync, ``acks=1`` for the leader alone.
    """

    def __init__(self, client: Client, *, acks: int = ALL, in_flight: int = IN_FLIGHT_MAX) -> None:
        if acks not in (ALL, 1):
            raise ValueError(
                f"acks={acks}: an idempotent producer needs acknowledgements; use -1 (all) or 1 (the leader)"
            )
        if not 1 <= in_flight <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight={in_flight}: a broker remembers 5 batches, so it must be 1 to 5")
        self._client = client
        self._shell = client.shell
        with client.lock:
            self._producing = Producing(client.shell.core, acks=acks, in_flight=in_flight)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()

    def send(self, at: TopicPartition, batch: bytearray, on_ack: OnAck | None = None) -> None:
        """Send one record batch. Do not change it afterwards: its header is filled in here.

        A later call runs ``on_ack`` with the offset of the first record (-1 when the broker had the batch already
        and does not say where). Raises the first final error.
        """
        with self._client.lock:
            self._raise_error()
            self._producing.add(at, batch, on_ack, self._shell.now_ms())
            self._shell.turn(block=False)
            self._report()
            while self._producing.unacknowledged_bytes > UNACKNOWLEDGED_BYTES_MAX:
                self._shell.turn()
                self._report()

    def flush(self) -> None:
        """Wait until everything is acknowledged. Raises the first final error."""
        with self._client.lock:
            self._report()
            while self._producing.unacknowledged:
                self._shell.turn()
                self._report()

    def close(self) -> None:
        """Flush and close."""
        try:
            if self._producing.error is None:
                self.flush()
        finally:
            self._abandon()

    # Private

    def _report(self) -> None:
        """Run the callbacks of acknowledged batches, and raise the final error if there is one."""
        acked, self._producing.acked = self._producing.acked, []
        for on_ack, base_offset in acked:
            on_ack(base_offset)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._producing.error is not None:
            raise self._producing.error

    def _abandon(self) -> None:
        with self._client.lock:
            self._producing.close()
