"""Metrics and health over HTTP, on a listener of their own: ``/metrics``, ``/healthz`` and ``/readyz``.

It only reads: the other packages count what they do (``counters.py``), and know nothing of this one. A broker
without ``--metrics`` does not import it. Imports ``broker``, ``membership``, ``network``, ``partition`` and
``storage``.
"""
