"""Pauses of the garbage collector, and what the kernel knows of the process."""

from __future__ import annotations

import gc

from penstock.broker.metrics.process_figures import ProcessFigures
from penstock.machine import MachineClock


def test_collections_are_counted_between_start_and_close() -> None:
    figures = ProcessFigures(MachineClock())
    before = list(gc.callbacks)
    gc.collect()
    figures.start()
    gc.collect()
    figures.close()
    gc.collect()
    assert sum(figures.pauses[2].counts) == 1
    assert figures.pauses[2].sum_us > 0
    assert gc.callbacks == before


def test_the_process_has_the_names_that_all_exporters_give_it() -> None:
    names = {metric.name for metric in ProcessFigures(MachineClock()).collect()}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= names
