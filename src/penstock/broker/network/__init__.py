"""Connections: from clients and other nodes to this one, and from this node to others.

It knows no request by name, except for what is kept between requests: fetch sessions, for which it imports
``partition``, and the encoded Metadata response. The settings of TLS and SASL are values of ``listener_settings``,
and what nodes have to prove to each other is in ``internal_settings``.
"""
