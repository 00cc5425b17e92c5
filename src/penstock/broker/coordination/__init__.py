"""Coordinators stored in internal topics, and the producer ids that this broker hands out.

Imports ``partition``, ``clocks`` and ``controller``; nothing of ``replication``.
"""
