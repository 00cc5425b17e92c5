"""Parse HOST:PORT arguments, and tell loopback and wildcard addresses apart from others."""

from __future__ import annotations

import ipaddress
import socket

PORT_MAX = 65_535


def parse_address(text: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host is in brackets. Raises ValueError."""
    protocol, slashes, rest = text.rpartition("://")
    if slashes:
        raise ValueError(f"{text!r} is not HOST:PORT; write {rest} without {protocol}://")
    host, colon, port_text = text.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} has no port; write HOST:PORT, such as 127.0.0.1:9092")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is ambiguous; write an IPv6 address in brackets, such as [::1]:9092")
    if not host:
        raise ValueError(f"{text!r} has no host; write HOST:PORT, such as 127.0.0.1:9092")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > PORT_MAX:
        raise ValueError(f"{port_text!r} in {text!r} is not a port; a port is a number from 0 to {PORT_MAX}")
    return host, int(port_text)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether every address of the host is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"cannot resolve host {host!r}: {error.strerror or error}") from None
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def is_unspecified(host: str) -> bool:
    """Whether the host is "all interfaces", to which no client can connect."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
