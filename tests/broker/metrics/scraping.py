"""A broker in virtual time with metrics, and one that asks it over HTTP."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.virtual import VirtualStream, World

ADDRESS = ("127.0.0.1", 9464)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Http:
    """One connection to the metrics of a world."""

    def __init__(self, world: World, *, window: int | None = None) -> None:
        self.world = world
        self.stream: VirtualStream = world.network.dial("127.0.0.1", ADDRESS[1])
        assert self.stream.other is not None
        self.stream.other.window = window
        self._received = b""

    @property
    def is_closed(self) -> bool:
        """Whether the broker has closed it."""
        assert self.stream.other is not None
        return self.stream.other.is_closed

    def send(self, data: bytes) -> None:
        self.stream.send([data])

    def ask(self, path: str, *, method: str = "GET", host: str = "127.0.0.1:9464", more: str = "") -> None:
        self.send(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())

    def get(self, path: str, *, method: str = "GET", host: str = "127.0.0.1:9464", more: str = "") -> Answer:
        self.ask(path, method=method, host=host, more=more)
        return self.answer(has_body=method != "HEAD")

    def answer(self, *, has_body: bool = True) -> Answer:
        """The next answer, as soon as it is there."""
        found: list[Answer] = []

        def has_come() -> bool:
            answer = self._take(has_body)
            if answer is not None:
                found.append(answer)
            return bool(found)

        self.world.run_until(has_come, 60_000)
        return found[0]

    def _take(self, has_body: bool) -> Answer | None:
        self.receive()
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return None
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        size = int(headers["content-length"]) if has_body else 0
        if len(rest) < size:
            return None
        self._received = rest[size:]
        return Answer(int(status.split()[1]), headers, rest[:size])

    def receive(self) -> None:
        buffer = bytearray(1 << 16)
        while count := self.stream.recv_into(memoryview(buffer)):
            self._received += buffer[:count]


def samples(text: bytes) -> dict[str, float]:
    """Every sample by its name and labels, as in ``penstock_connections{listener=PLAINTEXT}``."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(world: World) -> dict[str, float]:
    answer = Http(world).get("/metrics")
    assert answer.status == 200, answer
    return samples(answer.body)
