"""Clients in other languages: a small program of ours around the library, driven line by line.

The program reads one JSON object per line on its standard input, ``{"do": "create_topic", ...}``, and answers
each, in order, with one line on its standard output: ``{"result": ...}`` or ``{"error": NAME, ...}``.
Bytes travel as base64. Members of groups poll on threads of the program; ``member`` asks how they are doing.
One process serves a whole test file, because starting a JVM costs more than most tests.

Security arrives as JSON in the variable PENSTOCK_TEST_SECURITY, under librdkafka's names; Java's program reads a
file with names of its own. A program that is not let in answers every command with the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interop.client import (
    PATIENCE_S,
    Acks,
    BrokerView,
    ClientError,
    ClusterView,
    ConfigView,
    GroupView,
    MemberView,
    Outgoing,
    PartitionView,
    Record,
    Security,
    Strategy,
    When,
    Written,
)

# The program's own patience is PATIENCE_S; it should be the first to give up, and say why.
ANSWER_TIMEOUT_S = 2 * PATIENCE_S
SECURITY_VARIABLE = "PENSTOCK_TEST_SECURITY"


class ProgramClient:
    def __init__(
        self,
        command: Sequence[str | Path],
        bootstrap: str,
        cwd: Path | None = None,
        security: Security | None = None,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the client)
        self._process = subprocess.Popen(
            [*command, bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            cwd=cwd,
            env={**os.environ, SECURITY_VARIABLE: json.dumps(dict(security or {}))},
        )

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def call(self, do: str, **arguments: Any) -> Any:
        """Send one command and return its result. Raises ClientError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        alarm = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        assert line, f"the program ended or hung at {do!r}:\n{self._stderr_tail()}"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"], answer.get("message", ""))
        return answer.get("result")

    def _stderr_tail(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:].decode(errors="replace")

    # Reading and writing

    def produce(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        codec: str = "none",
        acks: Acks = "all",
        idempotent: bool = False,
    ) -> list[Written]:
        sent = [
            {
                "value": _text(each.value),
                "key": _text(each.key),
                "headers": [[name, _text(value)] for name, value in each.headers],
                "partition": each.partition,
                "timestamp": each.timestamp,
            }
            for each in records
        ]
        answer = self.call(
            "produce", topic=topic, records=sent, codec=codec, acks=acks, idempotent=idempotent
        )
        return [Written(partition, offset) for partition, offset in answer]

    def consume(self, topic: str, starts: Mapping[int, int], count: int) -> list[Record]:
        answer = self.call("consume", topic=topic, starts=list(starts.items()), count=count)
        return [_record(each) for each in answer]

    def offset(self, topic: str, partition: int, when: When) -> int | None:
        found: int = self.call("offset", topic=topic, partition=partition, when=when)
        return None if found < 0 else found

    # Groups

    def join(
        self, group: str, topic: str, *, strategy: Strategy = "range", instance_id: str | None = None
    ) -> ProgramMember:
        number = self.call("join", group=group, topic=topic, strategy=strategy, instance_id=instance_id)
        return ProgramMember(self, number)

    def resume(self, group: str, topic: str, count: int) -> list[Record]:
        return [_record(each) for each in self.call("resume", group=group, topic=topic, count=count)]

    def groups(self) -> set[str]:
        return set(self.call("groups"))

    def describe_group(self, group: str) -> GroupView:
        answer = self.call("describe_group", group=group)
        members = (
            MemberView(each["client_id"], frozenset(each["partitions"]), each.get("instance_id"))
            for each in answer["members"]
        )
        return GroupView(answer["state"].upper(), answer["assignor"], tuple(members))

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        answer = self.call("committed", group=group, topic=topic, partitions=list(partitions))
        return {partition: offset for partition, offset in answer if offset >= 0}

    def alter_committed(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        self.call("alter_committed", group=group, topic=topic, offsets=list(offsets.items()))

    def delete_committed(self, group: str, topic: str, partitions: Sequence[int]) -> None:
        self.call("delete_committed", group=group, topic=topic, partitions=list(partitions))

    def delete_group(self, group: str) -> None:
        self.call("delete_group", group=group)

    # Topics, settings and the cluster

    def create_topic(self, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> None:
        self.call("create_topic", topic=topic, partitions=partitions, configs=dict(configs or {}))

    def delete_topic(self, topic: str) -> None:
        self.call("delete_topic", topic=topic)

    def create_partitions(self, topic: str, count: int) -> None:
        self.call("create_partitions", topic=topic, count=count)

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        self.call("delete_records", topic=topic, before=list(before.items()))

    def topics(self) -> set[str]:
        return set(self.call("topics"))

    def describe_topic(self, topic: str) -> dict[int, PartitionView]:
        return {
            index: PartitionView(leader, tuple(replicas), tuple(in_sync))
            for index, leader, replicas, in_sync in self.call("describe_topic", topic=topic)
        }

    def describe_configs(self, topic: str) -> dict[str, ConfigView]:
        answer = self.call("describe_configs", topic=topic)
        return {name: ConfigView(value, is_default) for name, value, is_default in answer}

    def alter_config(self, topic: str, name: str, value: str | None) -> None:
        self.call("alter_config", topic=topic, name=name, value=value)

    def describe_cluster(self) -> ClusterView:
        answer = self.call("describe_cluster")
        brokers = tuple(BrokerView(*each) for each in answer["brokers"])
        return ClusterView(answer["cluster_id"], answer["controller_id"], brokers)


class ProgramMember:
    def __init__(self, client: ProgramClient, number: int) -> None:
        self._client = client
        self._number = number
        self._records: list[Record] = []

    def partitions(self) -> frozenset[int]:
        return frozenset(self._ask()["partitions"])

    def revoked(self) -> int:
        revoked: int = self._ask()["revoked"]
        return revoked

    def records(self) -> list[Record]:
        self._ask()
        return list(self._records)

    def leave(self) -> None:
        self._ask()
        self._keep(self._client.call("leave", member=self._number))

    def _ask(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.call("member", member=self._number)
        self._keep(answer["records"])
        return answer

    def _keep(self, fresh: list[list[Any]]) -> None:
        """The program hands over each record once."""
        self._records += [_record(each) for each in fresh]


def _text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def _record(fields: Sequence[Any]) -> Record:
    partition, offset, timestamp, key, value, headers = fields
    named = tuple((name, _bytes(header)) for name, header in headers)
    return Record(partition, offset, timestamp, _bytes(key), _bytes(value), named)
