"""Penstock's tests. A package, so that every test can import ``tests.support`` and its neighbours."""
