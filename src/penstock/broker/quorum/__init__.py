"""The metadata quorum on this node: the shell around ``penstock.raft``, its log, snapshots and messages.

Imports ``network``, and of ``storage`` the reserve for full disks.
"""
