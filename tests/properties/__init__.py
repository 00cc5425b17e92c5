"""Random operations against a model that is too simple to be wrong."""
