"""TLS for streams: certificates, contexts, the stream itself, and the names of clients.

``TlsStream`` is an ``environment.Stream`` around another one. ``TlsSettings`` is what Kafka's ``ssl.*`` settings
mean, ``Certificates`` keeps a listener's context up to date, and ``PrincipalMapping`` turns the name in a client's
certificate into a user.

Imports the standard library and ``penstock.environment`` only, so brokers and clients can both use it.
"""
