"""Record batches as Arrow columns, and back.

``columns`` is the public API; ``kernel`` has its loops, compiled if there was a C compiler at install time. It
needs pyarrow and the protocol but not Spark, so any client can use it.
"""
