"""What holds for all tests."""

from __future__ import annotations

import gc
import signal

# What is imported stays: the collector need not walk through it now, nor after every few tests.
gc.disable()

# Shells start what runs in the background with Ctrl-C ignored, and programs hand that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
