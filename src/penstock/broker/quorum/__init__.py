"""The metadata quorum on this node: the shell around `penstock.raft`, its log, snapshots and messages."""
