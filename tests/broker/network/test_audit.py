"""Lines of the audit log about answers that this release does not make itself."""

from __future__ import annotations

from typing import Any

from penstock.broker.network.audit import Audit
from penstock.broker.network.authorization import ANONYMOUS
from penstock.protocol.messages.topics import CreatableTopicResult, CreateTopicsResponse


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(values)


def test_an_error_of_a_later_release_is_written_as_its_number() -> None:
    """During a rolling upgrade the controller may be newer, and its answer is written outside of any request."""
    log: Any = Log()
    clock: Any = None
    results = [CreatableTopicResult(name=str(error), error_code=error) for error in (29, 30_000, 29)]
    Audit(log, clock).done(ANONYMOUS, "127.0.0.1", 19, "t", CreateTopicsResponse(topics=results))
    assert [line["result"] for line in log.lines] == ["TOPIC_AUTHORIZATION_FAILED, 30000"]
