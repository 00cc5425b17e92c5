"""This broker's place in the cluster: registration, heartbeats, its lease, how current its metadata is."""
