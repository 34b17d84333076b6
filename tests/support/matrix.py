"""What the equality matrix on CPU devices and the one on accelerators have in common."""

from __future__ import annotations

from roundpipe.devices import DevicePool, open_cpu_pool
from roundpipe.devices.cpu import CpuDevice

from .backends import Accelerator
from .plain import Record, Subject, assert_same, train_plain

STEPS = 3
GRAINS = ("stage", "layer")
REAL_TOLERANCE = 2e-3  # after three optimizer steps, whose first is about sign(gradient)


def opened(kind: str, count: int) -> DevicePool:
    """So many devices, ``"cpu"`` or ``"accelerator"``."""
    return Accelerator().open(count) if kind == "accelerator" else open_cpu_pool(count)


def plain_on(
    pool: DevicePool, subject: Subject, num_microbatch: int, is_async: bool, steps: int = STEPS
) -> Record:
    """The plain loop on the first of the devices."""
    device = pool.devices[0]
    if isinstance(device, CpuDevice):
        return train_plain(subject, num_microbatch, is_async, steps, device.intraop_threads)
    return train_plain(subject, num_microbatch, is_async, steps, device=device.torch_device)


def is_bitwise(pool: DevicePool) -> bool:
    """Whether the same operations give the same bits wherever their operands lie."""
    return pool.devices[0].torch_device.type in ("cpu", "fakeacc")


def assert_equal(pool: DevicePool, got: Record, want: Record, tolerance: float = 0.0) -> None:
    """Bitwise, or to the subject's tolerance.

    Kernels of a real accelerator may be chosen by memory and streams, and sum in another order.
    """
    assert_same(got, want, tolerance if is_bitwise(pool) else REAL_TOLERANCE)
