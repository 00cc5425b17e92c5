"""Tests of the Spark source, sink and jobs: one shared session, real brokers."""
