"""The metadata quorum on this node: the shell around ``penstock.raft``, its log, snapshots and messages.

Imports ``network``, and from ``storage`` only the reserve for full disks.
"""
