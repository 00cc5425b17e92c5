"""The active controller, if it is on this node; its client; and how it notices that a broker has died.

Imports ``quorum`` and ``network``.
"""
