"""Connections: what clients and other nodes say to this one, and what this one says to others.

Knows no request by name, except for what is kept between requests: fetch sessions, for which it imports
``partition``, and the Metadata answer in bytes.
"""
