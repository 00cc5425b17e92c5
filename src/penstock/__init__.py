"""Penstock: a distributed message queue in Python that speaks the Kafka protocol."""

__version__ = "0.1.0"
