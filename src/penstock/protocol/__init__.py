"""Bytes to values and back: the Kafka wire protocol. Knows nothing of brokers."""
