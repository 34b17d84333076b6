"""Accelerators through torch's device-generic interface: CUDA, ROCm, XPU and others alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundpipe.errors import StateError

from .base import Device


def open_accelerators(named: Sequence[torch.device]) -> list[Device]:
    """Devices for ``named``; a repeated one becomes several logical devices that share it."""
    raise StateError("accelerators are not there yet")
