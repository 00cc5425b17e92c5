"""The listener for scrapers and probes, and what it answers.

    /metrics   every number of this node, as Prometheus's text
    /healthz   200: the process lives and its loop turns
    /readyz    200 if this node is in the cluster and has caught up; otherwise 503 and the reason, in one line

There is no authentication: by default only this machine may connect. Then the Host of a request must be an address
or ``localhost``, so that no web page can read it under a name of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from penstock.addresses import is_loopback
from penstock.broker.broker import Broker
from penstock.broker.metrics.http_connection import TEXT, Answer, HttpConnection
from penstock.broker.metrics.loop_lag import LoopLag
from penstock.broker.metrics.process_figures import ProcessFigures
from penstock.broker.metrics.readiness import Readiness
from penstock.broker.network.server import Server
from penstock.environment import Environment, Listener, Stream

CONNECTIONS_MAX = 32


class MetricsServer:
    def __init__(
        self,
        environment: Environment,
        broker: Broker,
        servers: Mapping[str, Server],
        process: ProcessFigures | None = None,
    ) -> None:
        self._environment = environment
        self._broker = broker
        self._servers = servers
        self._process = process
        self._loop_lag = LoopLag(environment)
        self._readiness = Readiness(broker)
        self._listener: Listener | None = None
        # The name it was told to listen on, and whether only this machine can connect.
        self._host = ""
        self._is_local = False
        # In the order in which they came.
        self._connections: dict[HttpConnection, None] = {}
        # Made with the first scrape: its library takes a tenth of a second to load.
        self._scrape: Callable[[Callable[[bytes], None]], None] | None = None
        self._content_type = TEXT
        # Scrapes that wait for that.
        self._waiting: list[Answer] = []

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Return the address as bound. Raises OSError."""
        self._host = host
        self._is_local = _is_local(host)
        self._listener = self._environment.network.listen(host, port, self._accept)
        self._loop_lag.start()
        if self._process is not None:
            self._process.start()
        return self._listener.address

    def close(self) -> None:
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        self._loop_lag.close()
        if self._process is not None:
            self._process.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self, stream: Stream) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            idle = next((each for each in self._connections if each.is_idle), None)
            if idle is None:
                stream.close()
                return
            idle.close()
        self._connections[HttpConnection(self._environment, stream, self)] = None

    # For the connections

    def closed(self, connection: HttpConnection) -> None:
        self._connections.pop(connection, None)

    def allows_host(self, host: str) -> bool:
        if not self._is_local:
            return True
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return name.lower() in ("", "localhost", self._host) or _is_address(name.strip("[]"))

    def answer(self, path: str, answer: Answer) -> None:
        match path:
            case "/metrics":
                self._answer_metrics(answer)
            case "/healthz":
                answer(200, b"ok\n", TEXT)
            case "/readyz":
                self._readiness.check(
                    lambda reason: (
                        answer(200, b"ready\n", TEXT)
                        if reason is None
                        else answer(503, f"{reason}\n".encode(), TEXT)
                    )
                )
            case _:
                answer(404, b"try /metrics, /healthz or /readyz\n", TEXT)

    def _answer_metrics(self, answer: Answer) -> None:
        if self._scrape is not None:
            self._scrape(lambda text: answer(200, text, self._content_type))
            return
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            self._environment.spawn.in_thread(_load, self._loaded, lane="upkeep")

    def _loaded(self, _: None, error: Exception | None) -> None:
        waiting, self._waiting = self._waiting, []
        if error is not None:
            for answer in waiting:
                answer(500, f"cannot load: {error}\n".encode(), TEXT)
            return
        from penstock.broker.metrics.families import Sources  # noqa: PLC0415 - loaded by now
        from penstock.broker.metrics.scrape import CONTENT_TYPE, Scraper  # noqa: PLC0415

        sources = Sources(self._broker, self._servers, self._loop_lag, self._process)
        self._scrape = Scraper(sources, self._readiness).scrape
        self._content_type = CONTENT_TYPE
        for answer in waiting:
            self._answer_metrics(answer)


def _load() -> None:
    """On a thread, so that the loop turns meanwhile."""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return False
