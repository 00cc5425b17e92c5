"""A broker that answers what a test puts into its mouth, over a real socket in Kafka's own framing."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from penstock.protocol.apis import API_VERSIONS, APIS, Api
from penstock.protocol.messages.cluster import ApiVersion, ApiVersionsResponse
from penstock.protocol.schema import Message

Answer = Message | Callable[[Any], Message]


class FakeBroker:
    """Knows the APIs it has answers for, in all our versions or up to those in ``newest``."""

    def __init__(self, *answers: Answer, newest: dict[int, int] | None = None, **answers_by: Answer) -> None:
        self._answers: dict[int, Answer] = {}
        for answer in answers:
            assert isinstance(answer, Message)
            self._answers[answer.KEY] = answer
        for name, answer in answers_by.items():
            self._answers[int(name.removeprefix("api_"))] = answer
        self._newest = newest or {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.bootstrap = f"127.0.0.1:{self._listener.getsockname()[1]}"
        # What it was asked, except for its versions.
        self.asked: list[Any] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                while size := stream.read(4):
                    content = stream.read(struct.unpack(">i", size)[0])
                    answer = self._answered(content)
                    stream.write(struct.pack(">i", len(answer)) + answer)
                    stream.flush()

    def _answered(self, content: bytes) -> bytes:
        key, version, correlation_id, name_size = struct.unpack_from(">hhih", content)
        api = APIS[key]
        head = struct.pack(">i", correlation_id) + bytes(api.response_header_version(version))
        if key == API_VERSIONS:
            return head + b"".join(api.encode_response[version](self._versions()))
        start = 10 + name_size + (api.request_header_version(version) == 2)
        request, end = api.decode_request[version](memoryview(content), start)
        assert end == len(content)
        self.asked.append(request)
        answer = self._answers[key]
        response = answer if isinstance(answer, Message) else answer(request)
        return head + b"".join(api.encode_response[version](response))

    def _versions(self) -> ApiVersionsResponse:
        apis = [APIS[key] for key in sorted(self._answers)]
        return ApiVersionsResponse(api_keys=[self._version(api) for api in apis])

    def _version(self, api: Api) -> ApiVersion:
        newest = self._newest.get(api.key, api.version_max)
        return ApiVersion(api_key=api.key, min_version=api.version_min, max_version=newest)
