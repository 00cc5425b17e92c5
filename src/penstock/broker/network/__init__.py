"""Connections: what clients and other nodes say to this one, and what this one says to others."""
