"""The messages of the Kafka protocol, one class each, one module per family."""

# The value of authorized operations when the client did not request them (KIP-430).
OPERATIONS_OMITTED = -(2**31)

# An unknown time or time difference.
TIME_UNKNOWN = -(2**63)
