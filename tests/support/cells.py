"""Cells for tests of the benchmarks' harness. This module imports little, so that their processes start soon."""

import os
import time


def measure(report, kind):
    """Report one value, then fail in the way that `kind` names, or report another."""
    report({"first": 1})
    if kind == "raises":
        raise RuntimeError("no room\nfor it")
    if kind == "dies":
        os._exit(7)
    if kind == "sleeps":
        time.sleep(60)
    print(f"output of {kind}")
    report({"second": 2})
