"""The network between the simulated machines: connections like TCP's, over links that delay, clog and break.

This is what the kernels do, so it goes on while a process is paused: accepting connections, keeping bytes in
order, telling the other end when a process died. A connection has two ``Pipe``s. Each delivers its packets in
order. While its link is cut they wait, and continue some time after it is mended, unless the sender's kernel
timed out before. So a cut shows as silence first and as a broken connection later, and the two ends may see the
break at very different times, or one of them never.

A cut is between hosts and in one direction: ``cut("a", "b")`` drops what a sends to b, and thereby also its
acknowledgements of what b sends. A host without power does not answer, while a host whose process died refuses
connections at once. The broker acts on that difference.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

from penstock.environment import Buffer, File, Listener, Stream
from penstock.sim.loop import Event, Loop, Process

# The longest delay between a packet's arrival and the process's callback.
WAKE_US_MAX = 150
# The first port used when port 0 is requested.
FIRST_ANY_PORT = 40_000
SYN_RETRY_MS = (1_000, 2_000, 4_000)
FIN: bytes | None = None


class Weather:
    """Parameters of the network, set by the plan and by faults."""

    def __init__(self) -> None:
        self.latency_ms = 0.5
        # Mean of an additional, exponentially distributed delay.
        self.jitter_ms = 0.5
        # Share of packets that are delayed further, and the longest delay.
        self.clogs = 0.0
        self.clog_ms_max = 2_000.0
        # Share of sends that arrive in two pieces.
        self.splits = 0.0
        self.window_bytes = (4_096, 65_536, 262_144)
        # How long a kernel retransmits before it breaks the connection.
        self.patience_ms = (4_000, 20_000)


class Fabric:
    """All hosts and the connections between them."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.chance = loop.streams["network"]
        self.weather = Weather()
        self._listeners: dict[tuple[str, int], SimListener] = {}
        self._pipes: dict[Pipe, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._without_power: dict[str, None] = {}
        # Ports of live hosts that refuse new connections: a firewall, a full queue.
        self._refusing: dict[tuple[str, int], None] = {}
        self._any_port = FIRST_ANY_PORT
        self.connections_made = 0
        self.bytes_carried = 0

    def door(self, process: Process) -> SimNetwork:
        """``environment.Network`` for one process."""
        return SimNetwork(self, process)

    # What happens to it

    def cut(self, source: str, target: str) -> None:
        self._cuts[(source, target)] = None

    def mend(self, source: str, target: str) -> None:
        self._cuts.pop((source, target), None)
        self._mended()

    def mend_all(self) -> None:
        self._cuts.clear()
        self._refusing.clear()
        self._mended()

    def _mended(self) -> None:
        for pipe in list(self._pipes):
            pipe.mended()

    def power_lost(self, host: str) -> None:
        """The machine is off and sends nothing more. Its processes have ended already or do so next."""
        self._without_power[host] = None
        for pipe in list(self._pipes):
            if pipe.source == host:
                pipe.sender.vanish()
            elif pipe.target == host:
                pipe.receiver.vanish()

    def power_back(self, host: str) -> None:
        self._without_power.pop(host, None)
        self._mended()

    def reset_some(self, source: str, target: str) -> int:
        """Break the connections between two hosts and lose packets in flight; returns their number."""
        count = 0
        for pipe in list(self._pipes):
            if (pipe.source, pipe.target) == (source, target) and not pipe.receiver.is_gone:
                pipe.sender.broken(errno.ECONNRESET)
                pipe.receiver.broken(errno.ECONNRESET)
                count += 1
        return count

    def refuse(self, host: str, port: int) -> None:
        """Refuse new connections from other hosts; existing ones continue."""
        self._refusing[(host, port)] = None

    def refuse_no_more(self, host: str, port: int) -> None:
        self._refusing.pop((host, port), None)

    def is_refusing(self, source: str, host: str, port: int) -> bool:
        return source != host and (host, port) in self._refusing

    def is_cut(self, source: str, target: str) -> bool:
        if source == target:
            return False
        return (
            (source, target) in self._cuts or target in self._without_power or source in self._without_power
        )

    @property
    def open_streams(self) -> int:
        return sum(not pipe.sender.is_gone for pipe in self._pipes)

    # For the ends

    def latency_us(self) -> int:
        weather, chance = self.weather, self.chance
        latency_ms = weather.latency_ms + chance.expovariate(1) * weather.jitter_ms
        if weather.clogs and chance.random() < weather.clogs:
            latency_ms += chance.random() * weather.clog_ms_max
        return 1 + int(latency_ms * 1000)

    def patience_ms(self) -> float:
        return self.chance.uniform(*self.weather.patience_ms)

    def listen(
        self, process: Process, host: str, port: int, on_connect: Callable[[Stream], None]
    ) -> SimListener:
        assert host in (process.host, "0.0.0.0", ""), f"{process.host} cannot listen on {host}"
        if port == 0:
            self._any_port += 1
            port = self._any_port
        taken = self._listeners.get((process.host, port))
        if taken is not None and taken.process.is_alive:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = SimListener(self, process, port, on_connect)
        self._listeners[(process.host, port)] = listener
        return listener

    def listener_at(self, host: str, port: int) -> SimListener | None:
        listener = self._listeners.get((host, port))
        return listener if listener is not None and listener.process.is_alive else None

    def unlisten(self, listener: SimListener) -> None:
        key = (listener.process.host, listener.address[1])
        if self._listeners.get(key) is listener:
            del self._listeners[key]

    def connect(self, caller: Process, listener: SimListener) -> tuple[SimStream, SimStream]:
        """Both ends of a new connection: the caller's and the acceptor's."""
        near = SimStream(self.loop, caller, listener.process.host)
        far = SimStream(self.loop, listener.process, caller.host)
        for sender, receiver in ((near, far), (far, near)):
            pipe = Pipe(self, sender, receiver)
            sender.outgoing = receiver.incoming = pipe
            self._pipes[pipe] = None
        self.connections_made += 1
        return near, far

    def forget(self, pipe: Pipe) -> None:
        self._pipes.pop(pipe, None)


class Pipe:
    """One direction of a connection: packets in order, at most a window of unread bytes."""

    __slots__ = (
        "_arrival",
        "_fabric",
        "_is_stalled",
        "_last_ready_us",
        "_packets",
        "_patience",
        "_room",
        "_window",
        "receiver",
        "sender",
        "source",
        "target",
    )

    def __init__(self, fabric: Fabric, sender: SimStream, receiver: SimStream) -> None:
        self._fabric = fabric
        self.sender = sender
        self.receiver = receiver
        self.source = sender.process.host
        self.target = receiver.process.host
        self._window = fabric.chance.choice(fabric.weather.window_bytes)
        # Bytes that the sender may still send before the reader reads.
        self._room = self._window
        # (earliest arrival, bytes or FIN), in order.
        self._packets: deque[tuple[int, bytes | None]] = deque()
        self._last_ready_us = 0
        # Arrival of the first packet.
        self._arrival: Event | None = None
        # The first packet waits for a cut to end.
        self._is_stalled = False
        # The retransmission timeout; armed while a cut delays an acknowledgement.
        self._patience: Event | None = None

    @property
    def room(self) -> int:
        return self._room

    def send(self, data: bytes | None) -> None:
        weather, chance = self._fabric.weather, self._fabric.chance
        if data is not None:
            self._room -= len(data)
            self._fabric.bytes_carried += len(data)
            if weather.splits and len(data) > 1 and chance.random() < weather.splits:
                half = chance.randrange(1, len(data))
                self._queue(data[:half])
                data = data[half:]
        self._queue(data)

    def _queue(self, data: bytes | None) -> None:
        ready_us = max(self._last_ready_us, self._fabric.loop.now_us + self._fabric.latency_us())
        self._last_ready_us = ready_us
        self._packets.append((ready_us, data))
        if self._arrival is None and not self._is_stalled:
            self._expect(ready_us)

    def _expect(self, at_us: int) -> None:
        self._arrival = self._fabric.loop.at(at_us, self._arrive, "packet")

    def _arrive(self) -> None:
        self._arrival = None
        fabric = self._fabric
        if fabric.is_cut(self.source, self.target):
            self._is_stalled = True
            self._be_patient()
            return
        if self.receiver.is_gone:
            self._packets.clear()
            if not fabric.is_cut(self.target, self.source):
                # The other end is gone: the kernel sends a reset.
                sender = self.sender
                fabric.loop.at(
                    fabric.loop.now_us + fabric.latency_us(), lambda: sender.broken(errno.ECONNRESET), "reset"
                )
            return
        if fabric.is_cut(self.target, self.source):
            self._be_patient()  # the acknowledgement is lost
        now_us = fabric.loop.now_us
        while self._packets and self._packets[0][0] <= now_us:
            _, data = self._packets.popleft()
            fabric.loop.note(f"{crc32(data)}" if data is not None else "fin")
            self.receiver.received(data)
        if self._packets:
            self._expect(self._packets[0][0])

    def _be_patient(self) -> None:
        if self._patience is None:
            self._patience = self._fabric.loop.after(self._fabric.patience_ms(), self._give_up, "give up")

    def _give_up(self) -> None:
        self._patience = None
        if self._fabric.is_cut(self.source, self.target) or self._fabric.is_cut(self.target, self.source):
            self.sender.broken(errno.ETIMEDOUT)

    def mended(self) -> None:
        """A link was mended, perhaps ours: waiting packets are retransmitted at the kernel's next attempt."""
        if self._fabric.is_cut(self.source, self.target):
            return
        if self._patience is not None and not self._fabric.is_cut(self.target, self.source):
            self._patience.cancel()
            self._patience = None
        if self._is_stalled:
            self._is_stalled = False
            delay_us = int(self._fabric.chance.uniform(1_000, 1_500_000))
            self._last_ready_us = max(self._last_ready_us, self._fabric.loop.now_us + delay_us)
            if self._packets:
                self._expect(self._fabric.loop.now_us + delay_us)

    def consumed(self, count: int) -> None:
        """The reader has read: after the acknowledgement, the sender may send more."""
        if self._room > self._window // 2:
            self._room += count
            return
        fabric = self._fabric

        def acknowledged() -> None:
            if fabric.is_cut(self.target, self.source):
                fabric.loop.after(500, acknowledged, "window")
                return
            self._room += count
            self.sender.has_room()

        fabric.loop.at(fabric.loop.now_us + fabric.latency_us(), acknowledged, "window")

    def lose(self) -> None:
        """Drop the packets in flight."""
        self._packets.clear()
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def ended(self) -> None:
        """One end is gone. When both are, drop the pipe."""
        if self.sender.is_gone and self.receiver.is_gone:
            self.lose()
            if self._patience is not None:
                self._patience.cancel()
            self._fabric.forget(self)


class SimStream:
    """``environment.Stream``: one end of a connection, as its process sees it."""

    __slots__ = (
        "_failure",
        "_has_ended",
        "_loop",
        "_on_readable",
        "_on_writable",
        "_received",
        "_wake",
        "incoming",
        "is_gone",
        "outgoing",
        "peer",
        "process",
    )

    incoming: Pipe
    outgoing: Pipe

    def __init__(self, loop: Loop, process: Process, peer: str) -> None:
        self._loop = loop
        self.process = process
        self.peer = peer
        self._received = bytearray()
        # The other end has closed, after the received bytes.
        self._has_ended = False
        # Error code of a broken connection; 0 if it is not broken. Received bytes are lost with it.
        self._failure = 0
        # This end is closed, or its process ended.
        self.is_gone = False
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._wake: Event | None = None
        process.on_end[self.close] = None

    # For the process

    def recv_into(self, buffer: memoryview) -> int | None:
        if self._failure:
            return 0
        count = min(len(self._received), len(buffer))
        if count == 0:
            return 0 if self._has_ended or self.is_gone else None
        buffer[:count] = self._received[:count]
        del self._received[:count]
        self.incoming.consumed(count)
        return count

    def send(self, buffers: Sequence[Buffer]) -> int:
        return self._send(b"".join(buffers))

    def send_file(self, file: File, position: int, size: int) -> int:
        data = file.read_at(position, min(size, max(1, self.outgoing.room)))
        if not data:
            raise OSError(errno.EIO, "the file is shorter than the range to send", file.path)
        return self._send(data)

    def _send(self, data: bytes) -> int:
        if self.is_gone:
            raise OSError(errno.EBADF, "the stream is closed")
        if self._failure:
            raise OSError(self._failure, "the connection is gone")
        data = data[: max(0, self.outgoing.room)]
        if data:
            self.outgoing.send(data)
        return len(data)

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        self._on_readable = callback
        self._rouse()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._on_writable = callback
        self._rouse()

    def close(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._on_readable = self._on_writable = None
        if self._failure:
            pass
        elif self._received:
            # As in real kernels, closing with unread bytes resets the connection.
            self._break_other_end()
        else:
            self.outgoing.send(FIN)
        self._end()

    # For the network

    def received(self, data: bytes | None) -> None:
        if data is None:
            self._has_ended = True
        else:
            self._received += data
        self._rouse()

    def has_room(self) -> None:
        self._rouse()

    def broken(self, failure: int) -> None:
        """The connection is broken for this end."""
        if self.is_gone or self._failure:
            return
        self._failure = failure
        self._received.clear()
        self.outgoing.lose()
        self._rouse()

    def vanish(self) -> None:
        """The machine lost power."""
        if not self.is_gone:
            self.is_gone = True
            self.outgoing.lose()
            self._end()

    def _break_other_end(self) -> None:
        pipe, fabric = self.outgoing, self.outgoing._fabric
        pipe.lose()
        if not fabric.is_cut(pipe.source, pipe.target):
            receiver = pipe.receiver
            self._loop.at(
                self._loop.now_us + fabric.latency_us(), lambda: receiver.broken(errno.ECONNRESET), "reset"
            )

    def _end(self) -> None:
        self.process.on_end.pop(self.close, None)
        self.incoming.ended()
        self.outgoing.ended()

    def _rouse(self) -> None:
        """Schedule the process's callbacks, if it waits for something that is ready."""
        if self._wake is None and (self._is_readable() or self._is_writable()):
            at_us = self._loop.now_us + self._loop.jitter_us(WAKE_US_MAX)
            self._wake = self._loop.at(at_us, self._turn, "ready", self.process)

    def _is_readable(self) -> bool:
        return self._on_readable is not None and bool(self._received or self._has_ended or self._failure)

    def _is_writable(self) -> bool:
        return self._on_writable is not None and (self.outgoing.room > 0 or bool(self._failure))

    def _turn(self) -> None:
        self._wake = None
        if self._is_readable() and self._on_readable is not None:
            self._on_readable()
        if self._is_writable() and self._on_writable is not None:
            self._on_writable()
        # Level-triggered, like a real selector.
        self._rouse()


class SimListener:
    def __init__(
        self, fabric: Fabric, process: Process, port: int, on_connect: Callable[[Stream], None]
    ) -> None:
        self._fabric = fabric
        self.process = process
        self.address: tuple[str, int] = (process.host, port)
        self._on_connect = on_connect
        self._is_open = True

    def accept(self, stream: SimStream) -> None:
        """The kernel has accepted a connection; the process gets it at its next turn."""

        def accepted() -> None:
            if self._is_open:
                self._on_connect(stream)
            else:
                stream.close()

        loop = self._fabric.loop
        loop.at(loop.now_us + loop.jitter_us(WAKE_US_MAX), accepted, "accept", self.process)

    def close(self) -> None:
        self._is_open = False
        self._fabric.unlisten(self)


class SimNetwork:
    def __init__(self, fabric: Fabric, process: Process) -> None:
        self._fabric = fabric
        self._process = process

    def listen(self, host: str, port: int, on_connect: Callable[[Stream], None]) -> Listener:
        return self._fabric.listen(self._process, host, port, on_connect)

    def connect(self, host: str, port: int, done: Callable[[Stream | None, OSError | None], None]) -> None:
        """Call ``done`` later, with a connection or with an error."""
        fabric, process = self._fabric, self._process
        loop = fabric.loop

        def finish(stream: Stream | None, error: OSError | None) -> None:
            loop.at(loop.now_us + fabric.latency_us(), lambda: done(stream, error), "connected", process)

        def knock(attempt: int) -> None:
            if not process.is_alive:
                return
            if fabric.is_cut(process.host, host) or fabric.is_cut(host, process.host):
                if attempt == len(SYN_RETRY_MS):
                    finish(None, TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
                else:
                    loop.after(SYN_RETRY_MS[attempt], lambda: knock(attempt + 1), "knock")
                return
            listener = fabric.listener_at(host, port)
            if listener is None or fabric.is_refusing(process.host, host, port):
                finish(None, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
                return
            near, far = fabric.connect(process, listener)
            listener.accept(far)
            finish(near, None)

        loop.at(loop.now_us + fabric.latency_us(), lambda: knock(0), "knock")
