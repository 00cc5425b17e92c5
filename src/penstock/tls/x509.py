"""Reads the subject and the end of validity out of a certificate.

Python's ``ssl`` gives the subject without the types of its values, which the names of unusual attributes contain,
and no dates of a certificate that is only in a file. Both are near the start of a certificate, so a small reader of
DER is enough. It checks every length, because a client sends the bytes; OpenSSL has accepted them before.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator

_INTEGER, _OBJECT_ID, _UTC_TIME, _GENERALIZED_TIME, _SEQUENCE, _SET = 0x02, 0x06, 0x17, 0x18, 0x30, 0x31
_VERSION = 0xA0
# The types of values that are written as text: UTF8String, PrintableString, T61String, IA5String, GeneralString,
# BMPString. Java takes T61String for UTF-8, as most who write it do.
_ENCODINGS = {0x0C: "utf-8", 0x13: "utf-8", 0x14: "utf-8", 0x16: "utf-8", 0x1B: "utf-8", 0x1E: "utf-16-be"}
# The attributes that RFC 2253 has a keyword for. Java, and so Kafka, writes the others as numbers.
_KEYWORDS = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
# Of an object identifier. Writing a number takes time that grows with the square of its length. An identifier made
# of a UUID, which is long already, has 20 bytes.
_OBJECT_ID_BYTES_MAX = 64
_ESCAPED = frozenset(',=+<>#;"\\')


def subject_name(certificate: bytes) -> str:
    """The subject as Kafka writes it (RFC 2253): the last attribute first, as in ``CN=alice,OU=x,O=y``.

    Raises ValueError if this is not a certificate.
    """
    subject = _fields(certificate)[1]
    names = []
    for tag, value in _elements(subject):
        _expect(tag, _SET)
        names.append("+".join(_attribute(attribute) for tag, attribute in _elements(value)))
    return ",".join(reversed(names))


def expiry_ms(certificate: bytes) -> int:
    """When the certificate expires, as wall time. Raises ValueError if this is not a certificate."""
    validity = list(_elements(_fields(certificate)[0]))
    if len(validity) != 2:
        raise ValueError("a validity of two times is expected")
    tag, value = validity[1]
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280, 4.1.2.5.1: two digits of the year, which are of 1950 to 2049.
        text = ("20" if text[:2] < "50" else "19") + text
    else:
        _expect(tag, _GENERALIZED_TIME)
    if len(text) != 15 or not text[:14].isdigit() or text[14] != "Z":
        raise ValueError("not a time of a certificate")
    year, month, day = int(text[:4]), int(text[4:6]), int(text[6:8])
    hour, minute, second = int(text[8:10]), int(text[10:12]), int(text[12:14])
    return calendar.timegm((year, month, day, hour, minute, second)) * 1000


def _fields(certificate: bytes) -> tuple[bytes, bytes]:
    """The validity and the subject."""
    tag, content = next(_elements(certificate), (0, b""))
    _expect(tag, _SEQUENCE)
    tag, content = next(_elements(content), (0, b""))
    _expect(tag, _SEQUENCE)
    # RFC 5280, 4.1: version (optional), serial number, signature, issuer, validity, subject.
    fields: list[tuple[int, bytes]] = []
    for tag, value in _elements(content):
        if tag == _VERSION and not fields:
            continue
        fields.append((tag, value))
        if len(fields) == 5:
            break
    if [tag for tag, _ in fields] != [_INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE, _SEQUENCE]:
        raise ValueError("not a certificate")
    return fields[3][1], fields[4][1]


def _attribute(attribute: bytes) -> str:
    parts = list(_elements(attribute))
    if len(parts) != 2:
        raise ValueError("an attribute is a type and a value")
    _expect(parts[0][0], _OBJECT_ID)
    number = _object_id(parts[0][1])
    tag, value = parts[1]
    keyword = _KEYWORDS.get(number)
    encoding = _ENCODINGS.get(tag)
    if keyword is not None and encoding is not None:
        try:
            return f"{keyword}={_escape(value.decode(encoding))}"
        except UnicodeDecodeError:
            pass
    # The value with its tag and length: the rest of the attribute.
    return f"{keyword or number}=#{attribute[2 + len(parts[0][1]) :].hex()}"


def _escape(text: str) -> str:
    stripped = text.lstrip(" ")
    leading = len(text) - len(stripped)
    stripped = stripped.rstrip(" ")
    trailing = len(text) - leading - len(stripped)
    middle = "".join(map(_escaped_character, stripped))
    return "\\ " * leading + middle + "\\ " * trailing


def _escaped_character(character: str) -> str:
    if character in _ESCAPED:
        return f"\\{character}"
    # Java does this only with 0. But a name must not break the line of a log, or change its order.
    if not character.isprintable():
        return "".join(f"\\{byte:02X}" for byte in character.encode())
    return character


def _object_id(value: bytes) -> str:
    if not value or value[-1] & 0x80:
        raise ValueError("an object identifier is cut off")
    if len(value) > _OBJECT_ID_BYTES_MAX:
        raise ValueError(f"an object identifier is longer than {_OBJECT_ID_BYTES_MAX} bytes")
    numbers: list[int] = []
    number = 0
    for byte in value:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, [first, numbers[0] - 40 * first, *numbers[1:]]))


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and the content of each element in these bytes."""
    position = 0
    while position < len(data):
        if position + 2 > len(data):
            raise ValueError("an element is cut off")
        tag, size = data[position], data[position + 1]
        position += 2
        if size & 0x80:
            width = size & 0x7F
            if not 1 <= width <= 4 or position + width > len(data):
                raise ValueError("a length that no certificate has")
            size = int.from_bytes(data[position : position + width], "big")
            position += width
        if position + size > len(data):
            raise ValueError("an element is longer than what contains it")
        yield tag, data[position : position + size]
        position += size


def _expect(tag: int, expected: int) -> None:
    if tag != expected:
        raise ValueError(f"tag {expected:#x} is expected here, not {tag:#x}")
