"""The active controller, if it is this node; the way to it, wherever it is; how it notices that brokers die.

Imports ``quorum`` and ``network``.
"""
