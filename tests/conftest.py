"""What holds for all tests."""

from __future__ import annotations

import gc

# What is imported stays: the collector need not walk through it now, nor after every few tests.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
