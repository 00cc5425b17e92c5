"""What the broker does with each request: one module per family, plain functions, and the table of them.

Imports everything below ``node``: handlers get the ``Broker`` and reach the rooms through it. No room imports them.
"""
