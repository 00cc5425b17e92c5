"""Transactions on this broker: asking coordinators, verifying produced batches, sending and writing markers.

The rules of transactions are in ``penstock.transactions``. Imports ``coordination``, ``network`` and ``partition``.
"""
