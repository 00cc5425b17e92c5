"""What the broker does with each request: one module per family, plain functions."""
