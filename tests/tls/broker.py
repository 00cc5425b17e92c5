"""A broker that has listeners with TLS only, of which one requires certificates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import BrokerProcess
from tests.tls.files import TlsFiles


@dataclass(frozen=True, slots=True)
class TlsBroker:
    process: BrokerProcess
    files: TlsFiles

    def address(self, listener: str = "SSL") -> str:
        host, port = self.process.addresses[listener]
        return f"{host}:{port}"


@contextmanager
def tls_broker(directory: Path, settings: Mapping[str, str]) -> Iterator[TlsBroker]:
    files = TlsFiles(directory)
    tls = {
        "listeners": "SSL://127.0.0.1:0,MUTUAL://127.0.0.1:0",
        "listener.security.protocol.map": "MUTUAL:SSL",
        **files.settings("none"),
        "listener.name.mutual.ssl.client.auth": "required",
    }
    with BrokerProcess({**settings, **tls}) as process:
        yield TlsBroker(process, files)
