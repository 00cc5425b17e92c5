"""Shell completion for the names of topics, groups and profiles.

The shell calls this on every Tab: if the cluster does not answer quickly, nothing is completed. Nothing is ever
printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import typer

ANSWER_TIMEOUT_S = 2.0


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    return _completed(context, incomplete, _topics)


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    return _completed(context, incomplete, _groups)


def profile_names(incomplete: str) -> list[str]:
    with suppress(Exception):
        from penstock.cli.profile_file import read_profiles  # noqa: PLC0415

        return sorted(name for name in read_profiles().profiles if name.startswith(incomplete))
    return []


def _topics(admin: Any) -> Iterator[str]:
    for name in admin.list_topics(timeout=ANSWER_TIMEOUT_S).topics:
        if not name.startswith("__"):
            yield name


def _groups(admin: Any) -> Iterator[str]:
    found = admin.list_consumer_groups(request_timeout=ANSWER_TIMEOUT_S).result(timeout=ANSWER_TIMEOUT_S)
    for group in found.valid:
        yield group.group_id


def _completed(context: typer.Context, incomplete: str, ask: Callable[[Any], Iterable[str]]) -> list[str]:
    # A half-typed command line may be missing anything.
    with suppress(Exception):
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415  # librdkafka

        from penstock.cli import client  # noqa: PLC0415

        bootstrap = context.params["bootstrap"]
        client.knock(bootstrap.servers, ANSWER_TIMEOUT_S)
        admin = AdminClient(client.settings(bootstrap))
        return sorted(name for name in ask(admin) if name.startswith(incomplete))
    return []
