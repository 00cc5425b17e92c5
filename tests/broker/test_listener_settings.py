"""The listeners of a broker from its settings: Kafka's rules, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.config import BrokerConfig, ConfigError
from penstock.broker.listener_settings import (
    ALLOWED_URLS,
    AUDIENCE,
    ISSUER,
    KEYS_URL,
    ClientListener,
    check_reach,
    client_listeners,
    unused_settings,
)
from penstock.broker.options import ServeOptions
from penstock.metadata import broker_settings
from penstock.protocol.listeners import CLIENTS, SecurityProtocol
from penstock.sasl.tokens import Rules
from penstock.tls.settings import ClientAuth

TLS_MAP = {"listener.security.protocol.map": "TLS:SSL"}
SASL = {"listeners": "SASL://127.0.0.1:1", "listener.security.protocol.map": "SASL:SASL_PLAINTEXT"}
TOKENS = {
    "sasl.enabled.mechanisms": "OAUTHBEARER",
    KEYS_URL: "file:///keys.json",
    ISSUER: "https://issuer",
    AUDIENCE: "kafka,other",
}


def options(
    listen: tuple[str, int] | None = None,
    advertise: tuple[str, int] | None = None,
    *,
    internal: tuple[str, int] | None = None,
    is_insecure: bool = False,
) -> ServeOptions:
    return ServeOptions(
        1, ("d",), listen, advertise, None, {}, None, internal=internal, is_insecure=is_insecure
    )


def listeners(**settings: str) -> tuple[ClientListener, ...]:
    return load({name.replace("_", "."): text for name, text in settings.items()})


def load(settings: dict[str, str], given: ServeOptions | None = None) -> tuple[ClientListener, ...]:
    config, _ = BrokerConfig.load(settings)
    return client_listeners(given or options(), config.static)


def complaint(settings: dict[str, str], given: ServeOptions | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_reach(load(settings, given), given or options())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_settings_there_is_one_plain_listener_on_loopback() -> None:
    (only,) = listeners()
    assert only.description == CLIENTS
    assert (only.address, only.advertised, only.tls) == (("127.0.0.1", 9092), None, None)


def test_the_options_are_the_short_form_of_one_plain_listener() -> None:
    (only,) = load({}, options(("::1", 0), ("kafka.example", 9092)))
    assert only.description == CLIENTS
    assert (only.address, only.advertised) == (("::1", 0), ("kafka.example", 9092))


def test_a_listener_has_the_protocol_of_its_name_or_of_the_map() -> None:
    found = listeners(
        listeners="PLAINTEXT://127.0.0.1:1, ssl://127.0.0.1:2,tls://127.0.0.1:3,OTHER://127.0.0.1:4",
        listener_security_protocol_map="tls:SSL, Other:plaintext,UNUSED:SASL_SSL",
    )
    assert [(each.description.name, each.description.security_protocol) for each in found] == [
        ("PLAINTEXT", SecurityProtocol.PLAINTEXT),
        ("SSL", SecurityProtocol.SSL),
        ("TLS", SecurityProtocol.SSL),
        ("OTHER", SecurityProtocol.PLAINTEXT),
    ]
    assert [each.address[1] for each in found] == [1, 2, 3, 4]
    assert all(each.description.advertises == each.description.name for each in found)
    assert [each.tls is not None for each in found] == [False, True, True, False]


def test_an_entry_of_the_map_wins_over_the_name() -> None:
    (only,) = listeners(listeners="PLAINTEXT://127.0.0.1:1", listener_security_protocol_map="PLAINTEXT:SSL")
    assert only.description.security_protocol is SecurityProtocol.SSL


def test_a_listener_that_is_not_advertised_otherwise_has_the_address_it_listens_on() -> None:
    plain, secure = load(
        {
            "listeners": "PLAINTEXT://127.0.0.1:9092,TLS://0.0.0.0:9093",
            "advertised.listeners": "TLS://[2001:db8::1]:19093",
            **TLS_MAP,
        }
    )
    assert (plain.advertised, secure.advertised) == (None, ("2001:db8::1", 19093))
    assert secure.description.url(("2001:db8::1", 19093)) == "TLS://[2001:db8::1]:19093"


def test_a_port_may_be_given_once_for_each_version_of_ip_and_0_often() -> None:
    found = load({"listeners": "PLAINTEXT://127.0.0.1:9092,SSL://[::1]:9092"})
    assert [each.address for each in found] == [("127.0.0.1", 9092), ("::1", 9092)]
    assert len(load({"listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0"})) == 2


def test_settings_of_a_listener_win_over_those_of_the_broker() -> None:
    first, second = load(
        {
            "listeners": "SSL://127.0.0.1:1,OTHER-TLS://127.0.0.1:2",
            "listener.security.protocol.map": "OTHER-TLS:SSL",
            "ssl.client.auth": "required",
            "ssl.keystore.location": "/broker.pem",
            "listener.name.other-tls.ssl.client.auth": "none",
            "listener.name.other-tls.ssl.principal.mapping.rules": "RULE:^CN=(.*?),.*$/$1/U",
        }
    )
    assert first.tls is not None and second.tls is not None
    assert (first.tls.settings.client_auth, second.tls.settings.client_auth) == (
        ClientAuth.REQUIRED,
        ClientAuth.NONE,
    )
    assert first.tls.settings.chain == second.tls.settings.chain is not None
    assert first.tls.principals.user("CN=a,O=b") == "CN=a,O=b"
    assert second.tls.principals.user("CN=a,O=b") == "A"
    assert (first.is_closed_to_strangers, second.is_closed_to_strangers) == (True, False)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"listeners": ""}, "a broker needs at least one"),
        ({"listeners": ","}, "a broker needs at least one"),
        ({"listeners": "127.0.0.1:9092"}, "write NAME://HOST:PORT"),
        ({"listeners": "PLAINTEXT://127.0.0.1"}, "has no port"),
        ({"listeners": "PLAINTEXT://127.0.0.1:99999"}, "is not a port"),
        ({"listeners": "PLAIN TEXT://127.0.0.1:1"}, "letters, digits, - and _ only"),
        ({"listeners": "a.b://127.0.0.1:1"}, "letters, digits, - and _ only"),
        ({"listeners": "INTERNAL://127.0.0.1:1"}, "INTERNAL is for connections between nodes"),
        ({"listeners": "controller://127.0.0.1:1"}, "CONTROLLER is for connections between nodes"),
        ({"listeners": "SSL://127.0.0.1:1,ssl://127.0.0.1:2"}, "the listener SSL is given twice"),
        (
            {"listeners": "PLAINTEXT://127.0.0.1:1,SSL://localhost:1"},
            "PLAINTEXT and SSL have the same port, 1",
        ),
        (
            {"listeners": "TLS://127.0.0.1:1"},
            "listener.security.protocol.map has no protocol for the listener TLS",
        ),
        ({"listener.security.protocol.map": "TLS"}, "write NAME:PROTOCOL, such as TLS:SSL; got 'TLS'"),
        ({"listener.security.protocol.map": "TLS:TLS"}, "write NAME:PROTOCOL"),
        ({"listener.security.protocol.map": "A:SSL,a:SSL"}, "A is given twice"),
        ({"listeners": "PLAINTEXT://:9092"}, "add PLAINTEXT://HOST:9092 with this machine's name"),
        ({"listeners": "PLAINTEXT://0.0.0.0:9092"}, "clients cannot connect to 0.0.0.0"),
        ({"advertised.listeners": "PLAINTEXT://0.0.0.0:9092"}, "clients cannot connect to 0.0.0.0:9092"),
        ({"advertised.listeners": "PLAINTEXT://host:0"}, "clients cannot connect to host:0"),
        ({"advertised.listeners": "SSL://host:1"}, "there is no listener SSL in listeners"),
        ({"listener.name.ssl.ssl.client.auth": "none"}, "there is no listener SSL in listeners"),
        ({"listener.name.plaintext.max.connections": "1"}, "only the settings of TLS"),
        ({"listener.name.plaintext.sasl.enabled.mechanisms": "X"}, "must be made of SCRAM-SHA-256"),
        ({"listener.name.plaintext.scram-sha-256.sasl.jaas.config": "x"}, "make users with `penstock users`"),
        ({"listener.name.plaintext.sasl.kerberos.service.name": "x"}, "Kerberos (GSSAPI) is not supported"),
        (
            SASL | {"sasl.enabled.mechanisms": ""},
            "listener SASL: sasl.enabled.mechanisms is empty; choose of",
        ),
        (SASL | TOKENS | {ISSUER: ""}, f"listener SASL: OAUTHBEARER needs {ISSUER}"),
        (SASL | TOKENS | {AUDIENCE: " "}, f"listener SASL: OAUTHBEARER needs {AUDIENCE}"),
        (SASL | TOKENS | {KEYS_URL: ""}, f"listener SASL: OAUTHBEARER needs {KEYS_URL}"),
        (SASL | TOKENS | {KEYS_URL: "http://a/b"}, "only file: and https: URLs are read"),
        (SASL | TOKENS | {KEYS_URL: "https://[a/b"}, f"{KEYS_URL} is not a URL"),
        (
            SASL | TOKENS | {KEYS_URL: "https://me:secret@a/b"},
            "a URL with a user or password is not supported",
        ),
        (SASL | TOKENS | {KEYS_URL: "file://host/keys"}, "write file:///path/to/keys.json"),
        (SASL | TOKENS | {KEYS_URL: "https://a/b", ALLOWED_URLS: "https://a"}, f"is not in {ALLOWED_URLS}"),
        ({"listener.name.plaintext.ssl.client.auth": "maybe"}, "must be one of required, requested, none"),
        ({"ssl.client.auth": "maybe"}, "must be one of required, requested, none"),
        ({"ssl.enabled.protocols": "TLSv1.1"}, "must be made of TLSv1.2, TLSv1.3"),
        ({"ssl.keystore.lokation": "x"}, "did you mean ssl.keystore.location?"),
        (
            {"listeners": "SSL://127.0.0.1:1", "ssl.keystore.type": "JKS"},
            "listener SSL: ssl.keystore.type=JKS",
        ),
        (
            {"listeners": "SSL://127.0.0.1:1", "ssl.principal.mapping.rules": "x"},
            "listener SSL: ssl.principal",
        ),
        (
            {"listeners": ",".join(f"L{n}://127.0.0.1:{n}" for n in range(1, 17))},
            "a broker has at most 15, not 16",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_the_setting(
    settings: dict[str, str], part: str
) -> None:
    message = complaint(settings)
    assert part in message
    named = (
        *settings,
        "listener SSL: ssl.",
        "listener SASL: ",
        "listeners",
        "advertised.listeners",
        "listener.security",
        "there is no",
    )
    assert message.startswith(named)


def test_an_option_and_the_setting_it_stands_for_are_not_both_given() -> None:
    for given, short, part in (
        (
            {"listeners": "SSL://127.0.0.1:1"},
            {"listeners": "PLAINTEXT://127.0.0.1:1"},
            "--listen and the setting",
        ),
        (
            {"advertised.listeners": "PLAINTEXT://a:1"},
            {"advertised.listeners": "PLAINTEXT://b:1"},
            "--advertise and",
        ),
        (
            {"listeners": "SSL://127.0.0.1:1"},
            {"advertised.listeners": "PLAINTEXT://b:1"},
            "--advertise goes with",
        ),
    ):
        with pytest.raises(ConfigError, match=part):
            BrokerConfig.load(given, options=short)


def test_an_address_for_other_machines_needs_certificates_of_clients_or_consent() -> None:
    beyond = {"listeners": "SSL://10.1.2.3:9093"}
    refused = "SSL://10.1.2.3:9093 is open to other machines without authentication"
    for auth in ("none", "requested"):
        assert refused in complaint({**beyond, "ssl.client.auth": auth})
        consent = options(is_insecure=True)
        check_reach(load({**beyond, "ssl.client.auth": auth}, consent), consent)
    check_reach(load({**beyond, "ssl.client.auth": "required"}), options())
    mixed = {"listeners": "SSL://10.1.2.3:9093,PLAINTEXT://10.1.2.3:9092", "ssl.client.auth": "required"}
    assert "PLAINTEXT://10.1.2.3:9092 is open" in complaint(mixed)
    check_reach(load({"listeners": "PLAINTEXT://127.0.0.1:1,SSL://[::1]:2"}), options())


def test_clients_and_nodes_do_not_share_an_address() -> None:
    given = options(internal=("127.0.0.1", 9092))
    assert "PLAINTEXT and --internal have the same address" in complaint({}, given)
    elsewhere = options(internal=("127.0.0.2", 9092))
    check_reach(load({}, elsewhere), elsewhere)


def test_settings_of_tls_that_nothing_uses_are_mentioned() -> None:
    settings = {"ssl.keystore.location": "x", "ssl.client.auth": "none"}
    assert list(unused_settings(load(settings), settings)) == [
        "ssl.client.auth has no effect: no listener has the protocol SSL or SASL_SSL"
    ]
    settings["listeners"] = "SSL://127.0.0.1:1"
    assert list(unused_settings(load(settings), settings)) == []
    only_controller = next(unused_settings((), settings))
    assert only_controller == "listeners has no effect: this node is only a controller"


def test_listeners_with_sasl_have_mechanisms_of_their_own() -> None:
    settings = SASL | TOKENS | {"listener.name.sasl.sasl.enabled.mechanisms": "PLAIN, OAUTHBEARER"}
    (listener,) = load(settings | {"connections.max.reauth.ms": "5000"})
    assert listener.sasl is not None and listener.sasl.tokens is not None
    assert listener.sasl.mechanisms == ("PLAIN", "OAUTHBEARER")
    assert (listener.sasl.session_ms_max, listener.sasl.receive_bytes_max) == (5000, 524_288)
    assert listener.sasl.tokens.keys_url == "file:///keys.json"
    assert listener.sasl.tokens.rules == Rules("https://issuer", ("kafka", "other"), "sub", 30)
    (warning,) = unused_settings((listener,), settings)
    assert warning == "listener SASL: without TLS, PLAIN sends passwords or tokens that others can read"


def test_only_sasl_over_tls_may_be_open_to_other_machines() -> None:
    check_reach(load({"listeners": "SASL_SSL://10.1.2.3:9092"}), options())
    assert "is open to other machines without encryption" in complaint(
        {"listeners": "SASL_PLAINTEXT://10.1.2.3:9092"}
    )


def test_a_file_may_name_listeners_and_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(
        'listeners = ["PLAINTEXT://127.0.0.1:0", "TLS://127.0.0.1:0"]\n'
        '"listener.security.protocol.map" = "TLS:SSL"\n'
        "[listener.name.tls.ssl]\n"
        'client.auth = "required"\n'
    )
    config, warnings = BrokerConfig.load({}, str(file))
    assert warnings == []
    plain, secure = client_listeners(options(), config.static)
    assert (plain.is_closed_to_strangers, secure.is_closed_to_strangers) == (False, True)


def test_secrets_of_a_listener_are_secrets_too() -> None:
    for name in ("ssl.keystore.key", "ssl.key.password", "ssl.truststore.certificates"):
        for prefix in ("", "listener.name.tls."):
            setting = broker_settings.find(prefix + name)
            assert setting is not None and setting.name == prefix + name and setting.is_sensitive
