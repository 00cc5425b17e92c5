"""The messages of the Kafka protocol, one class each, one module per family."""

# In place of the bits for what the caller may do, when it did not ask for them (KIP-430).
OPERATIONS_OMITTED = -(2**31)

# In place of a time, or of a difference of times, that nobody has told.
TIME_UNKNOWN = -(2**63)
