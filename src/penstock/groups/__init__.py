"""Consumer groups and their committed offsets, as a sans-IO core.

This package has the coordinator and what groups of every protocol share. ``classic`` is the protocol of JoinGroup
and SyncGroup.
"""
