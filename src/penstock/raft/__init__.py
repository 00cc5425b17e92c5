"""The metadata quorum: Raft as in KRaft, as a sans-IO core."""
