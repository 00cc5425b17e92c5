"""Every message we read or write, and random values for each: boundaries first, dull values rarely.

Values stay within what the oracles can hold: kio knows only error codes with a name, and times that fit a
``datetime``.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from penstock.protocol.apis import INTERNAL, advertised
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages import consumer_protocol, group_records, metadata_records
from penstock.protocol.messages.quorum import CONTROL_TYPE, ControlRecordKey
from penstock.protocol.schema import NO_UUID, OWN_TAGS, Field, Message, version_range

INTEGERS = {
    "b": (-(2**7), 2**7 - 1),
    "h": (-(2**15), 2**15 - 1),
    "H": (0, 2**16 - 1),
    "i": (-(2**31), 2**31 - 1),
    "q": (-(2**63), 2**63 - 1),
}

# Lengths around the place where a compact length (one more than the real one) needs a second byte.
LENGTHS = (0, 1, 2, 7, 126, 127, 128, 300)
LETTERS = "abcdefghijklmnopqrstuvwxyz-._0123456789"

ERROR_CODES = [code.value for code in ErrorCode]

# Our records fields may all be null; Kafka's may not where it sends a piece of a snapshot.
NEVER_NULL = ("unaligned_records",)

MessageAtVersion = tuple[type[Message], int]


def versions(cls: type[Message]) -> list[MessageAtVersion]:
    return [(cls, version) for version in version_range(cls.VERSIONS)]


def messages_of(module: Any) -> list[MessageAtVersion]:
    """The messages of a module that stand by themselves."""
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Message)
    ]
    return [pair for cls in classes if cls.VERSIONS for pair in versions(cls)]


# Nodes may ask each other everything that clients may ask them.
EVERY_API = advertised(INTERNAL)
API_MESSAGES = [pair for api in EVERY_API for cls in (api.request, api.response) for pair in versions(cls)]
METADATA_RECORDS = messages_of(metadata_records)
GROUP_RECORDS = messages_of(group_records)
CONSUMER_PROTOCOL = messages_of(consumer_protocol)
CONTROL_RECORDS = [pair for cls in CONTROL_TYPE.values() for pair in versions(cls)]
EVERY_MESSAGE = [
    *API_MESSAGES,
    *METADATA_RECORDS,
    *GROUP_RECORDS,
    *CONSUMER_PROTOCOL,
    *CONTROL_RECORDS,
    *versions(ControlRecordKey),
]


# Structs with a name that says more than Kafka's.
OTHER_NAMES = {
    "ActiveProducer": "ProducerState",
    "DescribedTransaction": "TransactionState",
    "DescribeProducersPartition": "PartitionResponse",
    "DescribeProducersRequestTopic": "TopicRequest",
    "DescribeProducersTopic": "TopicResponse",
    "ListedTransaction": "TransactionState",
    "QuotaAlteration": "EntryData",
    "QuotaAlterationResult": "EntryData",
    "QuotaEntityPart": "EntityData",
    "QuotaEntry": "EntryData",
    "QuotaFilterComponent": "ComponentData",
    "QuotaOp": "OpData",
    "QuotaValue": "ValueData",
    "ScramCredentialInfo": "CredentialInfo",
    "TransactionTopic": "TopicData",
}


def kafka_names(struct: type[Message]) -> list[str]:
    """What Kafka may call a struct: structs of one module that share a name there have longer ones here."""
    name = struct.__name__
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    if name == "Endpoint":
        return ["Endpoint", "LeaderEndpoint", "Listener"]
    bare = re.sub(r"^\w+(Request|Response|Message|Record)(?=[A-Z])|^Incremental", "", name)
    return [name, bare, f"{bare}Data", f"{bare}Snapshot"]


def title(pair: MessageAtVersion) -> str:
    return f"{pair[0].__name__}-v{pair[1]}"


class Samples:
    """Random messages from a seed. Fields a version does not have keep their defaults."""

    def __init__(self, seed: object) -> None:
        self.random = Random(str(seed))

    def message(self, cls: type[Message], version: int) -> Message:
        values = {field.name: self.field(field, version) for field in cls.FIELDS if field.exists(version)}
        return cls(**values)

    def field(self, field: Field, version: int) -> Any:
        if field.tag is not None and field.tag >= OWN_TAGS:
            # Nobody we are compared with has it.
            return [] if field.default == () else field.default
        if field.tag is not None and self.random.random() < 0.5:
            return [] if field.default == () else field.default
        if field.is_nullable(version) and field.name not in NEVER_NULL and self.random.random() < 0.3:
            return None
        value = self.value(field, version)
        if field.tag is not None and field.kind == "struct" and value == field.element():
            return None  # A tagged struct that says nothing is not sent.
        return value

    def value(self, field: Field, version: int) -> Any:
        match field.kind:
            case "?":
                return self.random.random() < 0.5
            case "d":
                return self.random.choice((0.0, -1.5, 1e300, 1048576.0))
            case "16s":
                return self.random.choice((NO_UUID, b"\xff" * 16, self.random.randbytes(16)))
            case "string":
                return self.text()
            case "binary" | "records":
                return self.random.randbytes(self.random.choice((*LENGTHS, 20_000)))
            case "struct":
                return self.message(field.element, version)
            case "array":
                return [self.element(field.element, version) for _ in range(self.count(field))]
            case _:
                return self.integer(field)

    def element(self, element: type[Message] | Field, version: int) -> Any:
        return self.value(element, version) if isinstance(element, Field) else self.message(element, version)

    def count(self, field: Field) -> int:
        if isinstance(field.element, Field):
            return self.random.choice((0, 1, 3, 127, 128))
        return self.random.choice((0, 1, 1, 2, 3))

    def integer(self, field: Field) -> int:
        low, high = INTEGERS[field.kind]
        if field.name.endswith("error_code"):
            return self.random.choice(ERROR_CODES)
        if field.name == "transaction_start_time_ms":
            # kio reads no negative time here.
            return self.random.choice((1, 1_700_000_000_123))
        if field.name.endswith("_ms") and field.kind == "q":
            return self.random.choice((-1, 1, 1_700_000_000_123))
        return self.random.choice((low, high, -1 if low else 1, 0, 1, self.random.randint(low, high)))

    def text(self) -> str:
        if self.random.random() < 0.2:
            return "żółć ☃ 𝄞" * self.random.choice((1, 30))
        return "".join(self.random.choices(LETTERS, k=self.random.choice(LENGTHS)))
