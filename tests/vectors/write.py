"""Writes the golden bytes of what no client sends: Kafka's own classes encode values made from its own schemas.

    python -m tests.vectors.write

Nodes of a cluster talk to each other in messages that the proxy of ``record`` never sees, and so does the
quorum in its control records and in records of security. For each of them and each version one full and one bare
value is drawn from the schema in Kafka's jars; ``KafkaMessages.java`` has Kafka encode them;
``tests/protocol/kafka_messages.txt`` keeps value and bytes. The values come from a seed, so that the file changes
only with Kafka or with the list below.
"""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

from penstock.protocol.schema import version_range
from tests import java
from tests.tools import ROOT, program
from tests.vectors import HERE

COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{java.KAFKA_VERSION}",
    f"org.apache.kafka:kafka-tools:{java.KAFKA_VERSION}",
)
WRITTEN = ROOT / "tests" / "protocol" / "kafka_messages.txt"
HEAD = f"""\
# What nodes say to each other, what administrators ask, and control records and records of security of the
# metadata log, as Apache Kafka {java.KAFKA_VERSION} encodes them: name, version, bytes, and the value in its JSON.
# Made by tests.vectors.write.
"""

# With the newest version that we know, where Kafka has a newer one.
APIS = {
    "SaslHandshake": None,
    "DescribeAcls": None,
    "CreateAcls": None,
    "DeleteAcls": None,
    "DescribeLogDirs": None,
    "SaslAuthenticate": None,
    "ElectLeaders": None,
    "AlterPartitionReassignments": None,
    "ListPartitionReassignments": None,
    "DescribeClientQuotas": None,
    "AlterClientQuotas": None,
    "DescribeUserScramCredentials": None,
    "AlterUserScramCredentials": None,
    "Vote": None,
    "BeginQuorumEpoch": None,
    "EndQuorumEpoch": None,
    "DescribeQuorum": None,
    "AlterPartition": None,
    "AddPartitionsToTxn": None,
    "AddOffsetsToTxn": None,
    "EndTxn": None,
    "WriteTxnMarkers": None,
    "TxnOffsetCommit": None,
    "DescribeProducers": None,
    "DescribeTransactions": None,
    "ListTransactions": 1,
    "UpdateFeatures": None,
    "Envelope": None,
    "FetchSnapshot": None,
    "BrokerRegistration": None,
    "BrokerHeartbeat": None,
    "UnregisterBroker": None,
    "AllocateProducerIds": None,
    "ConsumerGroupHeartbeat": None,
    "AssignReplicasToDirs": None,
    "ListConfigResources": None,
    "AddRaftVoter": None,
    "RemoveRaftVoter": None,
}
RECORDS = (
    "LeaderChangeMessage",
    "SnapshotHeaderRecord",
    "SnapshotFooterRecord",
    "KRaftVersionRecord",
    "VotersRecord",
)

METADATA_RECORDS = (
    "UserScramCredentialRecord",
    "RemoveUserScramCredentialRecord",
    "AccessControlEntryRecord",
    "RemoveAccessControlEntryRecord",
    "ClientQuotaRecord",
)

INTEGER_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


class Values:
    """A value of a schema in Kafka's JSON: full, or with everything empty, null or absent that may be."""

    def __init__(self, seed: str, *, bare: bool, structs: dict[str, Any]) -> None:
        self.random = Random(seed)
        self.bare = bare
        self.structs = structs

    def of(self, fields: list[dict[str, Any]], version: int) -> dict[str, Any]:
        made = {}
        for field in fields:
            if version not in version_range(field["versions"]):
                continue
            if self.bare and "tag" in field:
                continue
            name = field["name"][0].lower() + field["name"][1:]
            made[name] = self.value(field, field["type"], version)
        return made

    def value(self, field: dict[str, Any], kind: str, version: int) -> Any:
        nullable = field.get("nullableVersions", "none")
        if self.bare and nullable != "none" and version in version_range(nullable):
            return None
        if kind.startswith("[]"):
            return [
                self.value({**field, "nullableVersions": "none"}, kind[2:], version)
                for _ in range(self.count())
            ]
        if kind in INTEGER_BITS:
            half = 1 << INTEGER_BITS[kind] - 1
            return self.random.choice((-half, half - 1, -1, 0, 1, self.random.randrange(-half, half)))
        match kind:
            case "bool":
                return not self.bare
            case "uint16":
                return self.random.choice((0, 1, 9092, 2**16 - 1))
            case "float64":
                return self.random.choice((0.0, -1.5, 1048576.0, 1e300))
            case "uuid":
                return urlsafe_b64encode(self.random.randbytes(16)).decode().rstrip("=")
            case "string":
                return "" if self.bare else self.text()
            case "records" | "bytes":
                return b64encode(b"" if self.bare else self.random.randbytes(150)).decode()
            case _:
                return self.of(field.get("fields") or self.structs[kind], version)

    def count(self) -> int:
        return 1 if self.bare else 2

    def text(self) -> str:
        return self.random.choice(("żółć ☃ 𝄞", "".join(self.random.choices(string.ascii_letters, k=12))))


def _schema(jars: list[Path], name: str) -> dict[str, Any]:
    part, folder = ("metadata", "metadata") if name in METADATA_RECORDS else ("clients", "message")
    with ZipFile(next(jar for jar in jars if jar.name.startswith(f"kafka-{part}-"))) as files:
        text = files.read(f"common/{folder}/{name}.json").decode()
    schema: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return schema


def _drawn(jars: list[Path]) -> list[str]:
    """Lines of name, version and JSON."""
    names = [(api + way, newest) for api, newest in APIS.items() for way in ("Request", "Response")]
    lines = []
    for name, newest in names + [(record, None) for record in RECORDS + METADATA_RECORDS]:
        schema = _schema(jars, name)
        structs = {each["name"]: each["fields"] for each in schema.get("commonStructs", ())}
        for version in version_range(schema["validVersions"]):
            for bare in (False, True):
                if newest is not None and version > newest:
                    continue
                values = Values(f"{name} {version} {bare}", bare=bare, structs=structs)
                value = values.of(schema["fields"], version)
                shown = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                lines.append(f"{name} {version} {shown}")
    return lines


def main() -> None:
    jars = java.jars(*COORDINATES)
    class_path = os.pathsep.join(map(str, jars))
    classes = java.compiled(HERE / "KafkaMessages.java", class_path)
    drawn = _drawn(jars)
    done = subprocess.run(
        [program("java"), "-cp", f"{classes}{os.pathsep}{class_path}", "KafkaMessages"],
        input="".join(f"{line}\n" for line in drawn),
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    encoded = done.stdout.split()
    assert len(encoded) == len(drawn), done.stderr
    with WRITTEN.open("w", encoding="utf-8") as file:
        file.write(HEAD)
        for line, data in zip(drawn, encoded):
            name, version, value = line.split(" ", 2)
            file.write(f"{name} {version} {data} {value}\n")


if __name__ == "__main__":
    main()
