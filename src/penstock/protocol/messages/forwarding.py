"""Envelope (KIP-590): a client's request that a broker passes on to the active controller, with who sent it.

The request inside is a whole one, with its header, and so is the response.
"""

from __future__ import annotations

from penstock.protocol.schema import OWN_TAGS, Message, Response, binary, boolean, int16, string


class EnvelopeRequest(Message, key=58, versions="0", flexible="0+"):
    request_data: bytes = binary()
    # The version of DefaultPrincipalData as an int16, then the message.
    request_principal: bytes | None = binary(nullable=True)
    # Four or sixteen bytes; empty if the client's host is not an address.
    client_host_address: bytes = binary()
    # Ours: the host as the broker writes it, where the address alone would be written differently.
    client_host: str = string(tag=OWN_TAGS)


class EnvelopeResponse(Response, key=58, versions="0", flexible="0+"):
    response_data: bytes | None = binary(nullable=True, default=None)
    error_code: int = int16()


class DefaultPrincipalData(Message, versions="0", flexible="0+"):
    """A principal in an Envelope."""

    type: str = string()
    name: str = string()
    # Whether the client authenticated with a delegation token. There are none here.
    token_authenticated: bool = boolean()
