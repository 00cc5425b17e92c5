"""Python clients in a process of their own.

What such a client leaves behind when a broker goes away under it, open sockets and threads that go on, would stay
in the tests' own process: a warning of the garbage collector in some later test, or a descriptor that belongs to
somebody else by then.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.managers import BaseManager
from typing import Any, ParamSpec, TypeVar

from tests.interop.adapters.aiokafka import AiokafkaClient
from tests.interop.adapters.kafka_python import KafkaPythonClient
from tests.interop.client import Client, Security

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Not forked: a copy of a process that runs threads is good for nothing.
SPAWN = multiprocessing.get_context("spawn")


class _Clients(BaseManager):
    """The process, in which a client is made; its methods are called from here, and so are its members'."""


# Named, because the process would look for them among all that a client has, and so connect it.
_METHODS = [name for name in vars(Client) if not name.startswith("_")]
_Clients.register("member", create_method=False)
for _name, _client in (("aiokafka", AiokafkaClient), ("kafka_python", KafkaPythonClient)):
    _Clients.register(_name, _client, exposed=_METHODS, method_to_typeid={"join": "member"})


class IsolatedClient:
    """Whatever the client of this name can do."""

    def __init__(self, name: str, bootstrap: str, security: Security | None = None) -> None:
        self._process = _Clients(ctx=SPAWN)
        self._process.start(_end_with_the_tests)
        try:
            self._client = getattr(self._process, name)(bootstrap, dict(security or {}))
        except BaseException:
            self._process.shutdown()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        # And with the process the client, also one that hangs.
        self._process.shutdown()


def in_another_process(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    with ProcessPoolExecutor(1, SPAWN, _end_with_the_tests) as process:
        return process.submit(function, *arguments, **named).result()


def _end_with_the_tests() -> None:
    """A run of tests that is killed says goodbye to nobody."""
    tests = multiprocessing.parent_process()
    assert tests is not None

    def watch() -> None:
        tests.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
