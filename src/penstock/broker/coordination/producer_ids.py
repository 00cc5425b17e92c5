"""Producer ids for idempotent producers: unique in the cluster, taken in blocks from the controller."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.controller.controller_client import ControllerClient
from penstock.protocol.messages.brokers import AllocateProducerIdsRequest, AllocateProducerIdsResponse

ALLOCATE_VERSION = 0


class ProducerIds:
    """Hands out producer ids from blocks that the controller has given this broker."""

    def __init__(
        self, controller: ControllerClient, *, node_id: int, broker_epoch: Callable[[], int]
    ) -> None:
        self._controller = controller
        self._node_id = node_id
        self._broker_epoch = broker_epoch
        self._next = 0
        # Exclusive.
        self._end = 0
        self._is_asking = False
        self._waiting: list[tuple[Callable[[int], None], Callable[[], None]]] = []

    def next(self, done: Callable[[int], None], refused: Callable[[], None]) -> None:
        """Call ``done(producer id)``, or ``refused()`` when the controller gives no new block."""
        if self._next < self._end:
            self._next += 1
            done(self._next - 1)
            return
        self._waiting.append((done, refused))
        if not self._is_asking:
            self._is_asking = True
            request = AllocateProducerIdsRequest(broker_id=self._node_id, broker_epoch=self._broker_epoch())
            self._controller.forward(request, ALLOCATE_VERSION, self._allocated)

    def _allocated(self, response: AllocateProducerIdsResponse) -> None:
        self._is_asking = False
        waiting, self._waiting = self._waiting, []
        if response.error_code:
            for _, refused in waiting:
                refused()
            return
        self._next = response.producer_id_start
        self._end = self._next + response.producer_id_len
        for done, refused in waiting:
            self.next(done, refused)
