"""Copying: which partitions are fetched and by which loops, and what the controller hears of the replicas here.

Imports ``partition``, ``membership``, ``controller``, ``quorum``, ``network`` and ``storage``.
"""
