"""Lag, hot partitions and the findings of `penstock doctor`, for whatever shows them.

``lag.py``, ``hot.py`` and ``findings.py`` decide: samples and the time go in, figures and findings come out.
``collecting.py`` takes the samples with a wire client, ``alerts.py`` says what has changed and posts it.
"""
