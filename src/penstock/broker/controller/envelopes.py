"""Envelopes: how a client's request gets to the active controller together with who sent it (KIP-590).

``sealed`` and ``unsealed`` are the two ends of a request's way, ``enclosed`` and ``disclosed`` those of its
response's. Only nodes send envelopes, and only requests of clients that the controller decides are accepted in one:
not those of nodes, and not another envelope.
"""

from __future__ import annotations

import struct
from ipaddress import ip_address
from typing import Any, NamedTuple

from penstock.broker.network.authorization import Principal, Requester
from penstock.environment import Buffer
from penstock.protocol.apis import APIS, CLIENT, error_response
from penstock.protocol.errors import DecodeError, ErrorCode
from penstock.protocol.framing import LENGTH_BYTES
from penstock.protocol.messages.forwarding import DefaultPrincipalData, EnvelopeRequest, EnvelopeResponse
from penstock.protocol.requests import CORRELATION_BYTES, request_frame
from penstock.protocol.schema import Message, Response, decode, encode

VERSION = 0
# The requests of clients that go to the controller.
FORWARDED = frozenset(
    (
        19,  # CreateTopics
        20,  # DeleteTopics
        30,  # CreateAcls
        31,  # DeleteAcls
        33,  # AlterConfigs
        37,  # CreatePartitions
        43,  # ElectLeaders
        44,  # IncrementalAlterConfigs
        45,  # AlterPartitionReassignments
        46,  # ListPartitionReassignments
        49,  # AlterClientQuotas
        51,  # AlterUserScramCredentials
        57,  # UpdateFeatures
        64,  # UnregisterBroker
    )
)
PRINCIPAL_VERSION = 0
# It has no meaning: the response comes back in the response to the envelope.
CORRELATION_ID = 0

_header = struct.Struct(">hhih")
_version = struct.Struct(">h")
_correlation = struct.Struct(">i")


class Unsealed(NamedTuple):
    request: Message
    version: int
    requester: Requester


class BadEnvelope(Exception):
    """The envelope is answered with this error, and its request is not handled."""

    def __init__(self, error: ErrorCode) -> None:
        super().__init__(error.name)
        self.error = error


def sealed(request: Message, version: int, requester: Requester) -> EnvelopeRequest:
    parts = request_frame(APIS[request.KEY], version, CORRELATION_ID, b"", request)
    principal = DefaultPrincipalData(type=requester.principal.type, name=requester.principal.name)
    address, host = _address(requester.host)
    return EnvelopeRequest(
        request_data=b"".join(parts)[LENGTH_BYTES:],
        request_principal=_version.pack(PRINCIPAL_VERSION) + encode(principal, PRINCIPAL_VERSION),
        client_host_address=address,
        client_host=host,
    )


def unsealed(envelope: EnvelopeRequest) -> Unsealed:
    """Raises BadEnvelope."""
    data = memoryview(envelope.request_data)
    if len(data) < _header.size:
        raise BadEnvelope(ErrorCode.INVALID_REQUEST)
    key, version, _, client_id_size = _header.unpack_from(data)
    api = APIS.get(key) if key in FORWARDED else None
    if api is None:
        raise BadEnvelope(ErrorCode.INVALID_REQUEST)
    if not api.serves(version, CLIENT):
        raise BadEnvelope(ErrorCode.UNSUPPORTED_VERSION)
    position = _header.size + max(0, client_id_size)
    if api.request_header_version(version) == 2:
        # The tags at the end of the header. Brokers write none.
        if bytes(data[position : position + 1]) != b"\0":
            raise BadEnvelope(ErrorCode.INVALID_REQUEST)
        position += 1
    requester = Requester(_principal(envelope.request_principal), _host(envelope))
    try:
        request, _ = api.decode_request[version](data, position)
    except DecodeError:
        raise BadEnvelope(ErrorCode.INVALID_REQUEST) from None
    return Unsealed(request, version, requester)


def enclosed(response: Response, version: int) -> EnvelopeResponse:
    """The response to an envelope, around the response to the request inside."""
    if response.first_error() == ErrorCode.NOT_CONTROLLER:
        return EnvelopeResponse(error_code=ErrorCode.NOT_CONTROLLER)
    api = APIS[response.KEY]
    tags = b"\0" * api.response_header_version(version)
    try:
        body: list[Buffer] = api.encode_response[version](response)
    except struct.error:
        # It does not fit in this version: for example a message of more than 32 KB, with a name of the client's.
        return EnvelopeResponse(error_code=ErrorCode.UNKNOWN_SERVER_ERROR)
    return EnvelopeResponse(response_data=b"".join([_correlation.pack(CORRELATION_ID) + tags, *body]))


def disclosed(envelope: EnvelopeResponse | None, request: Message, version: int) -> Any | None:
    """The response to a request that was sent in an envelope; None if none came."""
    if envelope is None:
        return None
    if envelope.error_code or envelope.response_data is None:
        return error_response(request, version, envelope.error_code or ErrorCode.UNKNOWN_SERVER_ERROR)
    api = APIS[request.KEY]
    start = CORRELATION_BYTES + api.response_header_version(version)
    try:
        response, _ = api.decode_response[version](memoryview(envelope.response_data), start)
    except DecodeError:
        return None
    return response


def _principal(data: bytes | None) -> Principal:
    """Raises BadEnvelope."""
    try:
        view = memoryview(data or b"")
        if len(view) < _version.size or _version.unpack_from(view)[0] != PRINCIPAL_VERSION:
            raise BadEnvelope(ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE)
        principal = decode(DefaultPrincipalData, PRINCIPAL_VERSION, view[_version.size :])
    except DecodeError:
        raise BadEnvelope(ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE) from None
    if not principal.type or not principal.name:
        raise BadEnvelope(ErrorCode.PRINCIPAL_DESERIALIZATION_FAILURE)
    return Principal(principal.type, principal.name)


def _address(host: str) -> tuple[bytes, str]:
    """The bytes of an address, and its text if that differs from the usual text for these bytes."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return b"", host
    return address.packed, "" if str(address) == host else host


def _host(envelope: EnvelopeRequest) -> str:
    """Raises BadEnvelope."""
    if envelope.client_host:
        return envelope.client_host
    try:
        return str(ip_address(bytes(envelope.client_host_address)))
    except ValueError:
        raise BadEnvelope(ErrorCode.INVALID_REQUEST) from None
