"""Record batches as Arrow columns, and back.

``columns`` is what callers use; ``kernel`` has its loops, compiled where there was a C compiler at install. It
needs pyarrow and the protocol, and nothing of Spark, so that any client may use it.
"""
