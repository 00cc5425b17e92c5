"""The metadata the cluster agrees on (topics, partitions, brokers, settings) and the controller that decides it."""
