"""Tests of record batches as Arrow columns, on the compiled kernel and on the interpreted one."""
