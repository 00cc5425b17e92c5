"""The settings of SASL for all listeners of a broker. Those named ``sasl.*`` can also be set for one listener.

They are read when the broker starts. Users and their passwords are not among them: they are in the metadata of the
cluster, salted.
"""

from __future__ import annotations

from penstock.metadata.settings import (
    Setting,
    integer,
    long,
    password,
    refused,
    string,
    strings,
    table,
    without_meaning,
)

MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN", "OAUTHBEARER")
NO_JAAS = "users and their passwords are not in settings; make users with `penstock users`"
NO_KERBEROS = "Kerberos (GSSAPI) is not supported; use SCRAM"

SASL: dict[str, Setting] = table(
    # Kafka's default is GSSAPI, which does not exist here.
    strings(
        "sasl.enabled.mechanisms",
        "SCRAM-SHA-256,SCRAM-SHA-512",
        "How clients of listeners with SASL prove who they are.",
        *MECHANISMS,
    ),
    string(
        "sasl.oauthbearer.jwks.endpoint.url",
        None,
        "Where the keys are that tokens are checked with: a file: URL, or an https: URL that is allowed.",
    ),
    # In Kafka a system property, with the same meaning.
    strings(
        "sasl.oauthbearer.allowed.urls", "", "The https: URLs that the broker may read keys from, in full."
    ),
    string("sasl.oauthbearer.expected.issuer", None, "Who has to have issued a token; always checked."),
    strings("sasl.oauthbearer.expected.audience", None, "For whom a token may be; always checked."),
    integer(
        "sasl.oauthbearer.clock.skew.seconds",
        30,
        "By how much the clocks of the broker and of the issuer may differ.",
        0,
        3600,
    ),
    string("sasl.oauthbearer.sub.claim.name", "sub", "The claim of a token that is the name of the user."),
    long(
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        3_600_000,
        "How often the keys are read from an https: URL; from a file, every 10 s.",
        10_000,
    ),
    *without_meaning(
        "after a failure the keys are read again every 10 s",
        *(
            string(f"sasl.oauthbearer.jwks.endpoint.retry.backoff.{name}", None, "")
            for name in ("ms", "max.ms")
        ),
    ),
    *without_meaning(
        "scopes of tokens are not used", string("sasl.oauthbearer.scope.claim.name", "scope", "")
    ),
    *refused(NO_JAAS, password("sasl.jaas.config", "Kafka's place for login modules and their users.")),
    *refused(
        "there is no JVM to load a class into",
        *(
            string(f"sasl.{name}.class", None, "A class for authentication.")
            for name in (
                "server.callback.handler",
                "login.callback.handler",
                "login",
                "client.callback.handler",
            )
        ),
    ),
)

# Not for one listener.
SASL_OF_BROKER: dict[str, Setting] = table(
    integer(
        "sasl.server.max.receive.size", 524_288, "The largest request accepted before authentication.", 1024
    ),
    long(
        "connections.max.reauth.ms",
        0,
        "How long an authentication is valid until the client has to repeat it; 0: as long as the connection.",
        0,
    ),
    integer(
        "connection.failed.authentication.delay.ms",
        100,
        "How long a client whose authentication failed waits for the answer.",
        0,
        10_000,
    ),
)
