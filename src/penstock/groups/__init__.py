"""Groups and their committed offsets, as a sans-IO core.

Here is what groups of every protocol share, and the front door. ``classic`` is the protocol of JoinGroup and
SyncGroup.
"""
