"""Transactions over partitions and committed offsets, as a sans-IO core.

``coordinator`` is the entry point: one coordinator per partition of ``__transaction_state``. ``transitions`` is the
state machine of one transactional id, and ``changes`` its records.
"""
