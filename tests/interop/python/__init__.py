"""Programs around Python's Kafka libraries, each run as a process of its own (``python -m``)."""
