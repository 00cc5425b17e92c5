"""What the cluster agrees on: topics, partitions, brokers and settings."""
