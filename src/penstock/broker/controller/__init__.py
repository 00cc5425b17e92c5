"""The active controller, if it is this node, and how it watches the brokers' connections."""
