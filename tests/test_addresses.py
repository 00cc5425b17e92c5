from __future__ import annotations

import pytest

from penstock.addresses import format_address, is_loopback, is_unspecified, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9092", ("::1", 9092)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("broker.example:80", ("broker.example", 80)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("localhost", "has no port"),
        (":9092", "has no host"),
        ("[]:9092", "has no host"),
        ("::1:9092", "in brackets"),
        ("PLAINTEXT://localhost:9092", "without PLAINTEXT://"),
        ("kafka://localhost", "without kafka://"),
        ("localhost:http", "is not a port"),
        ("localhost:65536", "is not a port"),
        ("localhost:-1", "is not a port"),
        ("localhost:", "is not a port"),
        ("localhost:\N{SUPERSCRIPT TWO}", "is not a port"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:9092", "[::1]:9092", "localhost:1"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert format_address(*parse_address(text)) == text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_is_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "10.0.0.1"])
def test_other_addresses_are_open_to_others(host: str) -> None:
    assert not is_loopback(host)


def test_a_host_that_cannot_be_found_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.invalid"):
        is_loopback("nowhere.invalid")


def test_all_interfaces_are_unspecified() -> None:
    assert [is_unspecified(host) for host in ("0.0.0.0", "::", "127.0.0.1", "localhost")] == [
        True,
        True,
        False,
        False,
    ]
