"""Coordinators on internal topics, and the producer ids that this broker hands out."""
