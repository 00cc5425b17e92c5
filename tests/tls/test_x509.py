"""Names and dates of certificates. The names expected are those that Java 17, and so Kafka, gives."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.name import _ASN1Type as Type
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from penstock.tls.x509 import expiry_ms, subject_name

Attribute: TypeAlias = "x509.NameAttribute[Any]"
END = datetime(2051, 1, 1, tzinfo=UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


def certificate(*attributes: list[Attribute] | Attribute, end: datetime = END) -> bytes:
    rdns = [x509.RelativeDistinguishedName(a if isinstance(a, list) else [a]) for a in attributes]
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(rdns))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")]))
        .public_key(KEY.public_key())
        .serial_number(5)
        .not_valid_before(utc(2020, 1, 1))
        .not_valid_after(end)
        .sign(KEY, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.DER)


A = x509.NameAttribute


def test_last_attribute_comes_first() -> None:
    made = certificate(
        A(NameOID.COUNTRY_NAME, "CH"),
        A(NameOID.STATE_OR_PROVINCE_NAME, "ZH"),
        A(NameOID.LOCALITY_NAME, "Zürich"),
        A(NameOID.ORGANIZATION_NAME, "y"),
        A(NameOID.ORGANIZATIONAL_UNIT_NAME, "x"),
        A(NameOID.COMMON_NAME, "alice"),
    )
    assert subject_name(made) == "CN=alice,OU=x,O=y,L=Zürich,ST=ZH,C=CH"


def test_other_attributes_of_rfc_2253_have_keywords() -> None:
    made = certificate(
        A(NameOID.DOMAIN_COMPONENT, "ch"),
        A(NameOID.DOMAIN_COMPONENT, "example"),
        A(NameOID.USER_ID, "u1"),
        A(NameOID.STREET_ADDRESS, "Str 1"),
        A(NameOID.COMMON_NAME, "b"),
    )
    assert subject_name(made) == "CN=b,STREET=Str 1,UID=u1,DC=example,DC=ch"


def test_attributes_without_keyword_are_numbers() -> None:
    made = certificate(
        A(NameOID.COMMON_NAME, "a"),
        A(NameOID.EMAIL_ADDRESS, "a@b.ch"),
        A(NameOID.SERIAL_NUMBER, "12"),
        A(NameOID.TITLE, "Dr"),
    )
    assert subject_name(made) == (
        "2.5.4.12=#0c024472,2.5.4.5=#13023132,1.2.840.113549.1.9.1=#16066140622e6368,CN=a"
    )


def test_special_characters_are_escaped() -> None:
    made = certificate(
        A(NameOID.COMMON_NAME, 'a,b=c+d<e>f#g;h"i\\j'),
        A(NameOID.ORGANIZATION_NAME, " lead trail "),
        A(NameOID.ORGANIZATIONAL_UNIT_NAME, "  two  "),
        A(NameOID.LOCALITY_NAME, "#hash"),
        A(NameOID.STATE_OR_PROVINCE_NAME, "a/b@c*!$%&()|~`'"),
    )
    assert subject_name(made) == (
        "ST=a/b@c*!$%&()|~`',L=\\#hash,OU=\\ \\ two\\ \\ ,O=\\ lead trail\\ ,"
        'CN=a\\,b\\=c\\+d\\<e\\>f\\#g\\;h\\"i\\\\j'
    )
    assert subject_name(certificate(A(NameOID.COMMON_NAME, " "))) == "CN=\\ "


def test_one_name_cannot_look_like_two() -> None:
    forged = certificate(A(NameOID.COMMON_NAME, "mallory,CN=alice"))
    assert subject_name(forged) == "CN=mallory\\,CN\\=alice"


def test_name_stays_on_one_line() -> None:
    made = certificate(A(NameOID.COMMON_NAME, "a\nb\r\tc\x00d\x7fe\x1b[31m"))
    assert subject_name(made) == "CN=a\\0Ab\\0D\\09c\\00d\\7Fe\\1B[31m"
    # The next line, the line separator, and the sign that reverses the order of what follows.
    made = certificate(A(NameOID.COMMON_NAME, "a\x85b\u2028c\u202ed"))
    assert subject_name(made) == "CN=a\\C2\\85b\\E2\\80\\A8c\\E2\\80\\AEd"


def test_attributes_at_one_level_are_joined() -> None:
    made = certificate(
        [A(NameOID.COMMON_NAME, "a"), A(NameOID.USER_ID, "u"), A(NameOID.ORGANIZATION_NAME, "z")],
        A(NameOID.COUNTRY_NAME, "CH"),
    )
    assert subject_name(made) == "C=CH,CN=a+O=z+UID=u"


def test_unusual_types_of_text_are_read() -> None:
    made = certificate(
        A(NameOID.COMMON_NAME, "a", Type.PrintableString),
        A(NameOID.ORGANIZATION_NAME, "bé", Type.BMPString),
        A(NameOID.LOCALITY_NAME, "té", Type.T61String),
        A(NameOID.ORGANIZATIONAL_UNIT_NAME, "uni", Type.UniversalString),
    )
    assert subject_name(made) == "OU=#1c0c000000750000006e00000069,L=té,O=bé,CN=a"


def test_empty_subject_is_an_empty_name() -> None:
    assert subject_name(certificate()) == ""


@pytest.mark.parametrize(
    ("end", "expected_ms"),
    [
        (utc(2030, 6, 7, 8, 9, 10), 1_907_050_150_000),  # two digits of the year
        (utc(2049, 12, 31, 23, 59, 59), 2_524_607_999_000),
        (utc(2050, 1, 1), 2_524_608_000_000),  # four digits
        (utc(9999, 12, 31, 23, 59, 59), 253_402_300_799_000),
    ],
)
def test_expiry_is_read_in_both_formats(end: datetime, expected_ms: int) -> None:
    assert expiry_ms(certificate(A(NameOID.COMMON_NAME, "a"), end=end)) == expected_ms


def test_certificate_that_is_cut_off_is_an_error() -> None:
    made = certificate(A(NameOID.COMMON_NAME, "a"))
    for size in range(len(made)):
        with pytest.raises(ValueError):
            subject_name(made[:size])
        with pytest.raises(ValueError):
            expiry_ms(made[:size])


@pytest.mark.parametrize("size", [60, 64, 65, 50_000])
def test_long_object_identifier_is_refused(size: int) -> None:
    """One number of this many bytes: writing it would take long."""
    number = b"\x2a" + b"\xff" * (size - 2) + b"\x7f"
    name = element(0x31, element(0x30, element(0x06, number) + element(0x0C, b"a")))
    fields = [element(0x02, b"\5"), *[element(0x30, b"")] * 3, element(0x30, name)]
    made = element(0x30, element(0x30, b"".join(fields)))
    if size <= 64:
        assert subject_name(made) == f"1.2.{2 ** (7 * (size - 1)) - 1}=#0c0161"
    else:
        with pytest.raises(ValueError, match="longer than 64 bytes"):
            subject_name(made)


def element(tag: int, content: bytes) -> bytes:
    size = len(content)
    return bytes([tag]) + (bytes([size]) if size < 128 else b"\x84" + size.to_bytes(4, "big")) + content


@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_damaged_certificate_is_read_or_refused(position: int, value: int) -> None:
    made = bytearray(certificate(A(NameOID.COMMON_NAME, "a"), A(NameOID.EMAIL_ADDRESS, "a@b.ch")))
    made[position % len(made)] = value
    for read in (subject_name, expiry_ms):
        with suppress(ValueError):
            read(bytes(made))
