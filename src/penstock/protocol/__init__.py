"""The Kafka wire protocol: messages, record batches, and their encoding. Knows nothing of brokers."""
