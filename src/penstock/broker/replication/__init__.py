"""Replication: following other brokers, and reports about in-sync, placed and damaged replicas to the controller.

Imports ``partition``, ``membership``, ``controller``, ``quorum``, ``network`` and ``storage``.
"""
