"""The kernel's one source in its two forms: that both are there, of the same lines, and that they agree."""

from __future__ import annotations

import ast
import shutil
import sysconfig
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.columnar import columns as installed
from penstock.columnar import kernel
from penstock.protocol import records
from penstock.protocol.compression import Codec, TooLarge, compress
from penstock.protocol.records import HEADER_SIZE, CorruptBatch, decode_records, encode_batch
from tests.columnar.kernels import INTERPRETED, SOURCE, changed, everything, fix_crc, rows, with_body


def test_the_kernel_is_compiled_where_there_is_a_compiler() -> None:
    if not shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]):
        pytest.skip("no C compiler here")
    assert installed.IS_COMPILED, "install again: pip install --editable ."


@pytest.mark.skipif(not installed.IS_COMPILED, reason="the kernel is not compiled here")
def test_the_compiled_kernel_is_of_this_source() -> None:
    compiled = Path(kernel.__file__)
    for source in ("kernel.py", "kernel.pxd"):
        assert compiled.stat().st_mtime >= (SOURCE / source).stat().st_mtime, (
            f"{source} was changed since the kernel was compiled: pip install --editable ."
        )


def test_the_interpreted_kernel_needs_nothing_of_cython() -> None:
    tree = ast.parse((SOURCE / "kernel.py").read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert modules and not [module for module in modules if module and "cython" in module.lower()]


def test_the_kernel_and_the_protocol_agree_on_the_layout() -> None:
    """It has constants of its own, because they are C integers there."""
    for name in ("HEADER_SIZE", "CODEC_MASK", "LOG_APPEND_TIME", "TRANSACTIONAL", "CONTROL"):
        assert getattr(INTERPRETED.kernel, name) == getattr(records, name)


# --------------------------------------------------------------------------------------------- hostile bytes

NOTABLE = (0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF)


def sample(random: Random, codec: Codec) -> bytearray:
    def field() -> bytes | None:
        return random.choice((None, b"", random.randbytes(random.randrange(20)), bytes(70)))

    return encode_batch(
        [
            (
                1000 + random.randrange(5000),
                field(),
                field(),
                [("h" * random.randrange(4), field()) for _ in range(random.choice((0, 0, 1, 2)))],
            )
            for _ in range(random.randrange(1, 6))
        ],
        codec=codec,
        base_offset=random.choice((0, 5, 2**40)),
    )


def tampered(random: Random, batch: bytearray) -> bytearray:
    """With a CRC that is right, so that nothing stops the decoder before the records."""
    batch = bytearray(batch)
    way = random.randrange(6)
    if way < 3:
        for _ in range(random.choice((1, 1, 2, 5))):
            # The attributes are at 21, behind what the CRC does not cover.
            at = random.randrange(HEADER_SIZE if random.random() < 0.8 else 21, len(batch))
            batch[at] = random.choice(NOTABLE) if way else batch[at] ^ 1 << random.randrange(8)
        return fix_crc(batch)
    body = bytes(batch[HEADER_SIZE:])
    if way == 3:
        return with_body(batch, body[: random.randrange(len(body))])
    if way == 4:
        at = random.randrange(len(body))
        return with_body(batch, body[:at] + random.randbytes(random.randrange(1, 12)) + body[at:])
    return with_body(batch, bytes(random.choices((*NOTABLE, 4, 12, 14), k=random.randrange(7, 60))))


def outcome(columns: Any, data: bytes, **settings: Any) -> Any:
    """The rows, or what was said against them; anything else that is raised is a failure."""
    try:
        decoded = everything(columns, data, **settings)
    except CorruptBatch as error:
        return str(error)
    return rows(decoded), decoded.next_offset


def reference(batch: bytes) -> Any:
    """What the protocol's own decoder, which is slow and plain, makes of it."""
    try:
        found = decode_records(batch, bytes_max=1 << 20)
    except (CorruptBatch, TooLarge):
        return None
    offsets = [record.offset for record in found]
    header = records.decode_header(batch)
    # It trusts the offsets and timestamps inside; the kernel does not.
    if offsets != sorted(set(offsets)) or (
        offsets and not header.base_offset <= offsets[0] <= offsets[-1] <= header.last_offset
    ):
        return None
    if any(abs(record.timestamp) > 2**63 // 1000 for record in found):
        return None
    return [(*record[:4], list(record.headers)) for record in found]


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
def test_tampered_batches_are_refused_or_read_right_and_both_speeds_agree(codec: Codec) -> None:
    random = Random(f"tampered {codec}")
    # Most damage to compressed records is found by their codec.
    refused = read = 0
    for _ in range(1500 if codec == Codec.NONE else 150):
        batch = bytes(tampered(random, sample(random, codec)))
        slow = outcome(INTERPRETED, batch)
        assert outcome(installed, batch) == slow
        expected = reference(batch)
        if isinstance(slow, str):
            refused += 1
            assert expected is None, slow
        else:
            read += 1
            attributes = batch[22]
            if expected is not None and not attributes & records.CONTROL:
                assert slow[0] == expected
    assert refused > 20
    assert read > 2


def test_tampered_compressed_bodies_are_refused_or_read_right() -> None:
    """Damage below the compression, which no codec notices."""
    random = Random("inside")
    for turn in range(300):
        codec = list(Codec)[1 + turn % 4]
        plain = tampered(random, sample(random, Codec.NONE))
        body = compress(codec, bytes(plain[HEADER_SIZE:]))
        batch = with_body(plain, body, attributes=plain[22] & ~records.CODEC_MASK | codec)
        slow = outcome(INTERPRETED, bytes(batch))
        assert outcome(installed, bytes(batch)) == slow
        assert slow == outcome(INTERPRETED, bytes(changed(plain, attributes=plain[22] & ~records.CODEC_MASK)))


def test_noise_is_refused_or_ignored_and_both_speeds_agree() -> None:
    random = Random("noise")
    for _ in range(500):
        noise = bytearray(random.randbytes(random.randrange(200)))
        if len(noise) > 17 and random.random() < 0.9:
            noise[16] = 2
            noise[8:11] = bytes(3)
        slow = outcome(INTERPRETED, bytes(noise))
        assert outcome(installed, bytes(noise)) == slow


def test_a_response_cut_anywhere_is_read_up_to_there_at_both_speeds() -> None:
    random = Random("cut")
    first = encode_batch([(1, b"k", b"v", ())], base_offset=0)
    data = bytes(first + encode_batch([(2, b"k", b"v", ())], base_offset=1, codec=Codec.LZ4))
    for cut in range(len(data)):
        start, end = random.randrange(3), random.randrange(4)
        assert outcome(installed, data[:cut], start=start, end=end) == outcome(
            INTERPRETED, data[:cut], start=start, end=end
        )
