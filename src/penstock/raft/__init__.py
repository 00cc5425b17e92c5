"""The metadata quorum: Raft in KRaft's flavour, as a core that decides and does nothing."""
