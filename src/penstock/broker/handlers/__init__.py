"""Request handlers: one module of plain functions per family of APIs, and the table of routes.

Imports everything below ``node``: handlers get the ``Broker`` and reach the other packages through it. None of them
imports handlers.
"""
