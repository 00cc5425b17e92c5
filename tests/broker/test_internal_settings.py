"""How nodes know each other, by their settings; and what is refused before anything is opened."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.broker.config import BrokerConfig, ConfigError
from penstock.broker.internal_settings import (
    Stage,
    check_internal,
    internal_advice,
    internal_security,
)
from penstock.broker.listener_settings import client_listeners
from penstock.broker.options import ServeOptions
from penstock.protocol.listeners import SecurityProtocol
from penstock.tls.settings import ClientAuth

OPTIONS = ServeOptions(
    node_id=1,
    data_dirs=("d",),
    listen=None,
    advertise=None,
    rack=None,
    settings={},
    config_file=None,
    internal=("127.0.0.1", 9094),
    controllers={1: ("127.0.0.1", 9094)},
)
MAP = "listener.security.protocol.map"
TLS = {"ssl.keystore.location": "k", "ssl.truststore.location": "t"}
SSL = {MAP: "INTERNAL:SSL", **TLS, "penstock.node.principals": "User:CN=a,O=x; User:CN=b,O=x"}
SECRET = {"penstock.internal.secret.file": "s"}


def test_nodes_are_plain_unless_they_are_told_otherwise() -> None:
    security = internal_security({})
    assert security.is_plain and security.accepts_plain and security.connects_plain


def test_certificates_are_required_whatever_clients_need() -> None:
    for auth in ("none", "requested", "required"):
        security = internal_security({**SSL, "ssl.client.auth": auth})
        assert security.protocol is SecurityProtocol.SSL and security.stage is Stage.REQUIRED
        assert security.tls is not None and security.tls.settings.client_auth is ClientAuth.REQUIRED
        assert security.principals == frozenset(("User:CN=a,O=x", "User:CN=b,O=x"))
        assert not security.accepts_plain and not security.connects_plain


def test_the_internal_listener_has_settings_of_its_own() -> None:
    security = internal_security({**SSL, "listener.name.internal.ssl.truststore.location": "nodes.pem"})
    assert security.tls is not None and security.tls.settings.trusted is not None
    assert security.tls.settings.trusted.path == "nodes.pem"
    assert security.tls.settings.chain is not None and security.tls.settings.chain.path == "k"


@pytest.mark.parametrize("protocol", ["SASL_SSL", "SASL_PLAINTEXT"])
def test_with_a_secret_no_certificate_is_asked_for(protocol: str) -> None:
    security = internal_security(
        {MAP: f"INTERNAL:{protocol}", **TLS, **SECRET, "ssl.client.auth": "required"}
    )
    assert security.secret_file == "s" and security.principals is None
    assert (security.tls is not None) == (protocol == "SASL_SSL")
    if security.tls is not None:
        assert security.tls.settings.client_auth is ClientAuth.NONE


@pytest.mark.parametrize(
    ("stage", "accepts_plain", "connects_plain"),
    [("accepted", True, True), ("preferred", True, False), ("required", False, False)],
)
def test_the_stages_of_a_rolling_restart(stage: str, accepts_plain: bool, connects_plain: bool) -> None:
    security = internal_security({**SSL, "penstock.internal.security": stage})
    assert (security.accepts_plain, security.connects_plain) == (accepts_plain, connects_plain)
    assert bool(list(internal_advice(security))) == accepts_plain


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({MAP: "INTERNAL:SSL", **TLS}, "penstock.node.principals is missing"),
        ({**SSL, "penstock.node.principals": " ; "}, "penstock.node.principals is missing"),
        ({**SSL, "penstock.node.principals": "CN=a"}, "write User:NAME;User:NAME, got 'CN=a'"),
        ({**SSL, "penstock.node.principals": "*"}, "needs an authority for nodes only"),
        ({**SSL, "penstock.node.principals": "*;User:a"}, "needs an authority for nodes only"),
        ({MAP: "INTERNAL:SSL", "ssl.keystore.location": "k"}, "ssl.truststore.location is missing"),
        (
            {MAP: "INTERNAL:SASL_SSL", "ssl.keystore.location": "k", **SECRET},
            "ssl.truststore.location is missing",
        ),
        ({MAP: "INTERNAL:SASL_SSL", **TLS}, "penstock.internal.secret.file is missing"),
        ({MAP: "INTERNAL:SASL_PLAINTEXT"}, "penstock.internal.secret.file is missing"),
        (SECRET, "penstock.internal.secret.file needs a protocol"),
        ({"penstock.internal.security": "accepted"}, "penstock.internal.security needs a protocol"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        internal_security(settings)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_an_authority_for_nodes_only_needs_no_names() -> None:
    own = {"listener.name.internal.ssl.truststore.location": "nodes.pem"}
    assert internal_security({**SSL, **own, "penstock.node.principals": "*"}).principals is None


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"penstock\.internal\.security"):
        BrokerConfig.load({"penstock.internal.security": "sometimes"})


def check(settings: dict[str, str], options: ServeOptions = OPTIONS) -> None:
    check_internal(internal_security(settings), client_listeners(options, settings), options)


def test_secure_clients_need_secure_nodes() -> None:
    clients = {"listeners": "TLS://127.0.0.1:9093", MAP: "TLS:SSL", **TLS}
    with pytest.raises(ConfigError, match=r"INTERNAL:SSL or INTERNAL:SASL_SSL \(docs/guide/nodes\.md\)"):
        check(clients)
    check(clients, replace(OPTIONS, is_insecure=True))
    check(clients, replace(OPTIONS, internal=None, controllers={}))
    secure = {**clients, **SSL, MAP: "TLS:SSL,INTERNAL:SSL"}
    check(secure)
    # On the way there, with a warning.
    check({**secure, "penstock.internal.security": "accepted"})
    check({})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "without authentication"),
        ({**SSL, "penstock.internal.security": "preferred"}, "without authentication"),
        ({MAP: "INTERNAL:SASL_PLAINTEXT", **SECRET}, "without encryption"),
    ],
)
def test_an_address_for_other_machines_needs_proof_and_encryption(
    settings: dict[str, str], complaint: str
) -> None:
    options = replace(OPTIONS, internal=("10.1.2.3", 9094))
    with pytest.raises(ConfigError, match=rf"10\.1\.2\.3:9094 is open to other machines {complaint}"):
        check(settings, options)
    check(settings, replace(options, is_insecure=True))
    check(SSL, options)
    check({MAP: "INTERNAL:SASL_SSL", **TLS, **SECRET}, options)
