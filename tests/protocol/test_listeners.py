from __future__ import annotations

from penstock.metadata.values import BrokerImage, Endpoint
from penstock.model import BrokerId
from penstock.protocol.apis import CLIENT
from penstock.protocol.listeners import CLIENTS, NODES, ListenerDescription, SecurityProtocol

SECURE = ListenerDescription("SECURE", SecurityProtocol.SASL_SSL, CLIENT, advertises="SECURE")


def broker(*endpoints: Endpoint) -> BrokerImage:
    return BrokerImage(BrokerId(1), 1, bytes(16), endpoints, None, False, False, ())


def test_protocols_have_kafkas_numbers() -> None:
    assert {protocol.name: protocol.value for protocol in SecurityProtocol} == {
        "PLAINTEXT": 0,
        "SSL": 1,
        "SASL_PLAINTEXT": 2,
        "SASL_SSL": 3,
    }


def test_a_listener_is_written_as_in_kafkas_settings() -> None:
    assert CLIENTS.url(("10.0.0.1", 9092)) == "PLAINTEXT://10.0.0.1:9092"


def test_a_client_is_told_the_endpoints_of_the_listener_it_came_to() -> None:
    plain, nodes, secure = (
        Endpoint(name, name.lower(), 9092, 0) for name in (CLIENTS.name, NODES.name, SECURE.name)
    )
    both = broker(plain, nodes, secure)
    assert both.endpoint_for(CLIENTS) is plain
    assert both.endpoint_for(SECURE) is secure
    assert both.internal is nodes


def test_a_client_that_came_to_the_internal_listener_is_sent_to_the_other_one() -> None:
    plain, nodes = Endpoint(CLIENTS.name, "a", 9092, 0), Endpoint(NODES.name, "b", 9093, 0)
    assert broker(plain, nodes).endpoint_for(NODES) is plain


def test_a_broker_without_such_a_listener_has_no_address_for_its_clients() -> None:
    plain = Endpoint(CLIENTS.name, "a", 9092, 0)
    assert broker(plain).endpoint_for(SECURE) is None


def test_nodes_are_told_some_endpoint_of_a_broker_without_a_plain_one() -> None:
    secure = Endpoint(SECURE.name, "a", 9093, 3)
    assert broker(secure).endpoint_for(NODES) is secure
