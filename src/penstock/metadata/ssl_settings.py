"""The settings of TLS, ``ssl.*``, for all listeners of a broker.

Each may also be set for one listener, as ``listener.name.<name in lower case>.ssl.*``. They are read when the
broker starts; the files that they name are read again when they change (``penstock.tls.certificates``).
Certificates and keys given as text are passwords in Kafka's sense: they are never shown.
"""

from __future__ import annotations

from penstock.metadata.settings import Setting, password, refused, string, strings, table, without_meaning

_NO_STORE_PASSWORD = "a PEM file has no password of its own; ssl.key.password is that of an encrypted key"

SSL: dict[str, Setting] = table(
    string("ssl.keystore.location", None, "A PEM file with the broker's private key and its certificates."),
    password("ssl.keystore.key", "The broker's private key as PEM text, instead of ssl.keystore.location."),
    password("ssl.keystore.certificate.chain", "The broker's certificates as PEM text, its own first."),
    password("ssl.key.password", "The password of an encrypted private key."),
    string(
        "ssl.truststore.location", None, "A PEM file with the authorities that clients' certificates need."
    ),
    password("ssl.truststore.certificates", "These authorities as PEM text, instead of the file."),
    string(
        "ssl.client.auth",
        "none",
        "Whether clients need a certificate (required), may have one (requested), or are not asked (none).",
        *("required", "requested", "none"),
    ),
    strings(
        "ssl.enabled.protocols",
        "TLSv1.2,TLSv1.3",
        "The versions of TLS that are accepted.",
        *("TLSv1.2", "TLSv1.3"),
    ),
    string(
        "ssl.protocol",
        "TLSv1.3",
        "The newest version of TLS that is accepted.",
        *("TLSv1.2", "TLSv1.3", "TLS"),
    ),
    strings(
        "ssl.cipher.suites", "", "The ciphers for TLS 1.2, by OpenSSL's or Java's names; if empty, OpenSSL's."
    ),
    string(
        "ssl.principal.mapping.rules",
        "DEFAULT",
        "How the subject of a client's certificate becomes its principal: DEFAULT, RULE:pattern/replacement/[LU].",
    ),
    # Kafka's default is JKS. The error of another format says how to convert it.
    string("ssl.keystore.type", "PEM", "The format of the keystore; only PEM."),
    string("ssl.truststore.type", "PEM", "The format of the truststore; only PEM."),
    *refused(
        _NO_STORE_PASSWORD,
        password("ssl.keystore.password", "The password of a Java keystore."),
        password("ssl.truststore.password", "The password of a Java truststore."),
    ),
    *refused(
        "there is no JVM to load a class into",
        string("ssl.engine.factory.class", None, "A class that makes TLS engines."),
    ),
    string(
        "ssl.endpoint.identification.algorithm",
        "https",
        "Whether a node checks that another one's certificate is for its host (https) or not (empty).",
    ),
    *without_meaning(
        "new certificates may have other names",
        *(string(f"ssl.allow.{name}.changes", None, "") for name in ("dn", "san")),
    ),
    *without_meaning(
        "OpenSSL is used, not Java's providers",
        *(
            string(name, None, "")
            for name in (
                "ssl.keymanager.algorithm",
                "ssl.provider",
                "ssl.secure.random.implementation",
                "ssl.trustmanager.algorithm",
            )
        ),
    ),
)
