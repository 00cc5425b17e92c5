"""Whatever bytes arrive, in whatever pieces, the broker goes on: it runs, it answers others, it logs no traceback.

Three kinds of input: requests of every API and version with plausible or absurd values, the same damaged in
the middle, and random bytes. PENSTOCK_FUZZ_EXAMPLES sets how many of each are tried. Nothing is shrunk: a
failure prints the frames, and most of the time the broker's own traceback says more.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.protocol.apis import APIS, Api
from penstock.protocol.messages.topics import MetadataRequest, MetadataRequestTopic
from penstock.protocol.schema import Field, encoder
from tests.broker.conftest import SETTINGS, Node
from tests.broker.phrases import batch, find_coordinator, handshake
from tests.broker.wire import Closed, frame, header
from tests.protocol.samples import Samples
from tests.support import BrokerProcess

EXAMPLES = int(os.environ.get("PENSTOCK_FUZZ_EXAMPLES", "40"))
REQUESTS_PER_EXAMPLE = 25

VERSIONS = [
    (api, version) for api in APIS.values() for version in range(api.version_min, api.version_max + 1)
]
TOPICS = ("fuzzed-a", "fuzzed-b", "fuzzed.never", "..", "")
GROUPS = ("group-a", "group-b", "")

many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Plausible(Samples):
    """Requests that get past the first checks: they name what exists, and ask for little."""

    NAMES: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("topic", "name", "topic_name", "resource_name"), TOPICS),
        **dict.fromkeys(("group_id", "key"), GROUPS),
        **dict.fromkeys(("partition", "partition_index", "index"), (0, 0, 0, 1, -1, 2**31 - 1)),
        **dict.fromkeys(
            ("fetch_offset", "offset", "committed_offset", "timestamp"), (0, 0, 1, -1, -2, -3, 2**63 - 1)
        ),
        **dict.fromkeys(("num_partitions", "count"), (1, 2, -1, 0, 2**31 - 1)),
        **dict.fromkeys(("max_wait_ms", "timeout_ms", "rebalance_timeout_ms"), (0, 1, 10, -1)),
        "replication_factor": (1, -1, 3),
        "session_timeout_ms": (6000, 6000, 0, 2**31 - 1),
        "acks": (1, -1, -1, 7),
        "min_bytes": (0, 1, 100, -1),
        "protocol_type": ("consumer", "consumer", ""),
        "resource_type": (2, 2, 4, 0),
        "replica_id": (-1, -1, -1, 1),
        "session_epoch": (0, -1, 1, 2**31 - 1),
        "session_id": (0, 0, 1, -1),
        "transactional_id": (None, None, None, "mine"),
    }

    def value(self, field: Field, version: int) -> Any:
        if field.kind == "records":
            return self.records()
        if field.name in self.NAMES and self.random.random() < 0.9:
            return self.random.choice(self.NAMES[field.name])
        return super().value(field, version)

    def field(self, field: Field, version: int) -> Any:
        value = super().field(field, version)
        if value is None and not field.is_nullable(version) and field.kind == "string":
            return ""
        return value

    def records(self) -> bytes:
        sent = bytearray(
            batch(
                *(b"value" for _ in range(self.random.randint(1, 3))),
                producer_id=self.random.choice((-1, -1, 1, 2)),
                producer_epoch=self.random.choice((-1, 0)),
                base_sequence=self.random.choice((-1, 0, 1)),
            )
        )
        if self.random.random() < 0.5:
            sent[self.random.randrange(len(sent))] ^= 1 << self.random.randrange(8)
        return bytes(sent)


def content(api: Api, version: int, seed: int, samples: type[Samples]) -> bytes:
    """A request of this version without its length."""
    message = samples(seed).message(api.request, version)
    body = b"".join(bytes(part) for part in encoder(api.request, version)(message))  # type: ignore[arg-type]
    return header(api, version, seed & 0x7FFFFFFF) + body


def damaged(whole: bytes, random: Random) -> bytes:
    """The same with a few bytes flipped, overwritten, cut out, repeated or put in."""
    changed = bytearray(whole)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1 if place < len(changed):
                changed[place] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[place : place + random.randint(1, 20)]
            case 3:
                changed[place:place] = random.randbytes(random.randint(1, 20))
            case 4:
                changed[place:place] = changed[place : place + 40]
            case _:
                changed[place : place + 4] = struct.pack(
                    ">i", random.choice((-1, 2**31 - 1, -(2**31), 10**6))
                )
    return bytes(changed)


class Fuzzed(Node):
    """The broker, and another connection that must be served between any two examples."""

    def __init__(self, process: BrokerProcess) -> None:
        super().__init__(process)
        self.other = self.connect(timeout_s=10)

    def prepare(self) -> None:
        """The topics that plausible requests name; they may have deleted them."""
        asked = [MetadataRequestTopic(name=name) for name in TOPICS[:2]]
        self.other.call(MetadataRequest(topics=asked, allow_auto_topic_creation=True), 9)
        find_coordinator(self.other, GROUPS[0])

    def send(self, data: bytes, pieces: list[int]) -> None:
        """Send on a connection of its own, in pieces, and read what comes until the broker is done."""
        with self.connect(timeout_s=10) as wire:
            try:
                place = 0
                for size in pieces:
                    wire.send_bytes(data[place : place + size])
                    place += size
                wire.send_bytes(data[place:])
                wire.socket.shutdown(1)
                wire.drain(10)
            except (Closed, OSError):
                return

    def assert_goes_on(self, sent: list[bytes]) -> None:
        shown = "\n".join(data[:2000].hex() for data in sent)
        try:
            assert handshake(self.other) > 0
        except (Closed, OSError) as error:
            log = self.process.log_tail()
            self._start_again()
            raise AssertionError(f"not served after these: {error!r}\n{shown}\n{log}") from None
        log = self.process.log_path.read_text(errors="replace")
        self.process.log_path.write_text("")
        assert "Traceback" not in log, f"a traceback after these:\n{shown}\n{log[-6000:]}"

    def _start_again(self) -> None:
        self.other.close()
        self.process.kill()
        self.process.log_path.write_text("")
        self.process.start()
        self.other = self.connect(timeout_s=10)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    with BrokerProcess(SETTINGS) as process:
        node = Fuzzed(process)
        yield node
        node.other.close()


# One seed makes all the requests of an example; hypothesis is here for the choice of seeds and pieces.
seeds = st.integers(0, 2**64 - 1)
pieces = st.lists(st.integers(1, 600), max_size=4)


def requests(seed: int, samples: type[Samples]) -> Iterator[tuple[bytes, Random]]:
    """The contents of some frames, of any APIs and versions, and the generator to go on with."""
    random = Random(seed)
    for api, version in random.choices(VERSIONS, k=REQUESTS_PER_EXAMPLE):
        yield content(api, version, random.getrandbits(32), samples), random


@many
@given(seed=seeds, plausible=st.booleans(), pieces=pieces)
def test_any_values_in_any_request_are_survived(
    fuzzed: Fuzzed, seed: int, plausible: bool, pieces: list[int]
) -> None:
    fuzzed.prepare()
    sent = [frame(whole) for whole, _ in requests(seed, Plausible if plausible else Samples)]
    for data in sent:
        fuzzed.send(data, pieces)
    fuzzed.assert_goes_on(sent)


@many
@given(seed=seeds, keeps_length=st.booleans(), pieces=pieces)
def test_damaged_requests_are_survived(
    fuzzed: Fuzzed, seed: int, keeps_length: bool, pieces: list[int]
) -> None:
    fuzzed.prepare()
    sent = []
    for whole, random in requests(seed, Plausible):
        changed = damaged(whole, random)
        sent.append(struct.pack(">i", len(whole if keeps_length else changed)) + changed)
        fuzzed.send(sent[-1], pieces)
    fuzzed.assert_goes_on(sent)


@many
@given(seed=seeds, pieces=pieces)
def test_requests_sent_all_at_once_in_any_pieces_are_survived(
    fuzzed: Fuzzed, seed: int, pieces: list[int]
) -> None:
    fuzzed.prepare()
    together = b"".join(frame(whole) for whole, _ in requests(seed, Plausible))
    fuzzed.send(together, pieces)
    fuzzed.assert_goes_on([together])


@many
@given(rubbish=st.lists(st.binary(max_size=300), min_size=1, max_size=10), framed=st.booleans())
def test_random_bytes_are_survived(fuzzed: Fuzzed, rubbish: list[bytes], framed: bool) -> None:
    sent = [frame(data) if framed else data for data in rubbish]
    for data in sent:
        fuzzed.send(data, [])
    fuzzed.assert_goes_on(sent)
