"""The error codes in a response of any API, for the audit log and the counts of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from penstock.protocol.apis import APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message

ErrorFinder = Callable[[Any], Iterator[int]]

_ERRORS = frozenset(code.value for code in ErrorCode)
# Produce and Fetch, whose handlers know when there is an error: other responses are searched for it.
COUNTED_BY_HANDLERS = (0, 1)


@cache
def error_finder(message: type[Message]) -> ErrorFinder | None:
    """A function that yields every error in a message of this type; None if it can have none.

    It looks only at the fields that may have one: a list of all topics is long.
    """
    codes = [field.name for field in message.FIELDS if field.name.endswith("error_code")]
    arrays = [
        (field.name, found)
        for field in message.FIELDS
        if field.kind == "array"
        and isinstance(field.element, type)
        and issubclass(field.element, Message)
        and (found := error_finder(field.element)) is not None
    ]
    if not codes and not arrays:
        return None

    def find(response: Any) -> Iterator[int]:
        for name in codes:
            if error := getattr(response, name):
                yield error
        for name, find_in in arrays:
            for item in getattr(response, name) or ():
                yield from find_in(item)

    return find


def errors_to_count(api: int) -> ErrorFinder | None:
    """For the responses of an API whose handler does not count its errors."""
    return None if api in COUNTED_BY_HANDLERS else error_finder(APIS[api].response)


def error_name(error: int) -> str:
    # A controller of a later release may have others.
    return ErrorCode(error).name if error in _ERRORS else str(error)
