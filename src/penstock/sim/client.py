"""A small Kafka client for simulated machines: connections, metadata, and calls to brokers.

It does what any client library does: it refreshes its metadata when something goes wrong, closes a connection
that does not answer, and reconnects. The producers, readers and group members are built on it. A response is None
when the outcome of the request is unknown: the connection broke or the request timed out.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.environment import Stream
from penstock.protocol.apis import APIS, Api
from penstock.protocol.errors import DecodeError
from penstock.protocol.messages.groups import FindCoordinatorRequest
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic, MetadataResponse
from penstock.protocol.requests import request_frame
from penstock.protocol.schema import Message
from penstock.sim.loop import Process, Promise, sleep
from penstock.sim.network import Fabric, SimNetwork

METADATA_VERSION = 12
FIND_COORDINATOR_VERSION = 4
CALL_TIMEOUT_MS = 5_000
CLIENT_ID = b"simulated"
# What a coordinator is asked for by: a group or a transactional id.
GROUP = 0
TRANSACTION = 1

Address = tuple[str, int]


class Place(NamedTuple):
    """A partition, identified by topic id: a topic that is deleted and created again is another topic."""

    topic_id: bytes
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Leadership(NamedTuple):
    broker: int
    epoch: int


class Connection:
    """One connection: requests are sent at once, responses come back in the same order."""

    def __init__(self, process: Process, network: SimNetwork, address: Address) -> None:
        self._process = process
        self._stream: Stream | None = None
        self._correlation_id = 0
        self._waiting: deque[tuple[int, Api, int, Promise[Any]]] = deque()
        self._received = bytearray()
        self._unsent = bytearray()
        self.is_closed = False
        # Nobody waits for the answers.
        self.closes_when_sent = False
        network.connect(*address, self._connected)

    def _connected(self, stream: Stream | None, error: OSError | None) -> None:
        if stream is None or self.is_closed:
            if stream is not None:
                stream.close()
            self.close()
            return
        self._stream = stream
        stream.on_readable(self._readable)
        self._flush()

    def call(self, request: Message, version: int, timeout_ms: float) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        if self.is_closed:
            promise.keep(None)
            return promise
        api = APIS[type(request).KEY]
        self._correlation_id += 1
        self._unsent += b"".join(request_frame(api, version, self._correlation_id, CLIENT_ID, request))
        self._waiting.append((self._correlation_id, api, version, promise))
        self._flush()

        def time_is_up() -> None:
            # Close the connection: requests behind this one would have to wait for its response too.
            if not promise.is_kept:
                self.close()

        self._process.spawn.later(timeout_ms, time_is_up)
        return promise

    def _flush(self) -> None:
        if self._stream is None or self.is_closed:
            return
        try:
            while self._unsent:
                sent = self._stream.send([bytes(self._unsent)])
                if sent == 0:
                    break
                del self._unsent[:sent]
        except OSError:
            self.close()
            return
        self._stream.on_writable(self._flush if self._unsent else None)
        if self.closes_when_sent and not self._unsent:
            self.close()

    def _readable(self) -> None:
        assert self._stream is not None
        buffer = bytearray(65_536)
        count = self._stream.recv_into(memoryview(buffer))
        if count is None:
            return
        if count == 0:
            self.close()
            return
        self._received += memoryview(buffer)[:count]
        while len(self._received) >= 4 and not self.is_closed:
            size = struct.unpack_from(">i", self._received)[0]
            if len(self._received) < 4 + size:
                return
            answer = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            correlation_id, api, version, promise = self._waiting.popleft()
            assert struct.unpack_from(">i", answer)[0] == correlation_id, "responses are out of order"
            skip = 4 + api.response_header_version(version)
            try:
                response, end = api.decode_response[version](memoryview(answer), skip)
            except DecodeError as error:
                raise AssertionError(f"the response to {api.name} cannot be decoded") from error
            assert end == len(answer), f"{len(answer) - end} bytes after the response to {api.name}"
            promise.keep(response)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._stream is not None:
            self._stream.close()
        waiting, self._waiting = self._waiting, deque()
        for _, _, _, promise in waiting:
            promise.keep(None)


class Client:
    """A client with the brokers and leaders it knows from metadata."""

    def __init__(
        self, process: Process, fabric: Fabric, bootstrap: Iterable[Address], chance: random.Random
    ) -> None:
        self.process = process
        self.chance = chance
        self._network = fabric.door(process)
        self._bootstrap = list(bootstrap)
        self.brokers: dict[int, Address] = {}
        self._connections: dict[tuple[Address, str], Connection] = {}
        # From the newest metadata; older responses of brokers that lag are ignored (KIP-320).
        self.leaders: dict[Place, Leadership] = {}
        self.places: dict[str, list[Place]] = {}

    async def pause(self, delay_ms: float) -> None:
        await sleep(self.process, delay_ms)

    async def back_off(self) -> None:
        await sleep(self.process, self.chance.uniform(20, 300))

    def connection(self, address: Address, channel: str = "") -> Connection:
        """The connection to a broker; long polls use separate channels."""
        connection = self._connections.get((address, channel))
        if connection is None or connection.is_closed:
            connection = self._connections[address, channel] = Connection(
                self.process, self._network, address
            )
        return connection

    async def call(
        self,
        broker: int | None,
        request: Message,
        version: int,
        *,
        timeout_ms: float = CALL_TIMEOUT_MS,
        channel: str = "",
    ) -> Any:
        """The response, or None. ``broker`` None means any broker."""
        if broker is None:
            known = list(self.brokers.values()) or self._bootstrap
            # The known brokers may all be gone.
            address = self.chance.choice(known if self.chance.random() < 0.8 else self._bootstrap)
        elif broker in self.brokers:
            address = self.brokers[broker]
        else:
            return None
        return await self.connection(address, channel).call(request, version, timeout_ms)

    def send_late(self, broker: int, request: Message, version: int, delay_ms: float) -> None:
        """A copy of the request arrives after this time, on a connection that the client has given up by then."""
        address = self.brokers[broker]

        def arrive() -> None:
            connection = Connection(self.process, self._network, address)
            connection.closes_when_sent = True
            connection.call(request, version, CALL_TIMEOUT_MS)

        self.process.spawn.later(delay_ms, arrive)

    async def refresh(self, topics: list[str], *, create: bool = False) -> MetadataResponse | None:
        request = MetadataRequest(
            topics=[MetadataRequestTopic(name=name) for name in topics], allow_auto_topic_creation=create
        )
        response: MetadataResponse | None = await self.call(
            None, request, METADATA_VERSION, channel="metadata"
        )
        if response is None:
            return None
        if response.brokers:
            self.brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        for topic in response.topics:
            if topic.error_code or topic.name is None:
                continue
            places = []
            for partition in sorted(topic.partitions, key=lambda found: found.partition_index):
                place = Place(topic.topic_id, topic.name, partition.partition_index)
                places.append(place)
                known = self.leaders.get(place)
                if known is None or partition.leader_epoch >= known.epoch:
                    self.leaders[place] = Leadership(partition.leader_id, partition.leader_epoch)
            before = self.places.get(topic.name, [])
            if (
                not before
                or not places
                or before[0].topic_id != places[0].topic_id
                or len(places) > len(before)
            ):
                self.places[topic.name] = places
        return response

    async def find_coordinator(self, key: str, key_type: int = GROUP) -> int | None:
        """The broker that coordinates a group or a transactional id. Its address is known from then on."""
        request = FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
        response = await self.call(None, request, FIND_COORDINATOR_VERSION)
        if response is None or response.coordinators[0].error_code:
            return None
        found = response.coordinators[0]
        self.brokers[found.node_id] = (found.host, found.port)
        node_id: int = found.node_id
        return node_id

    def leader(self, place: Place) -> Leadership | None:
        leadership = self.leaders.get(place)
        if leadership is None or leadership.broker not in self.brokers:
            return None
        return leadership
