"""A fake accelerator: several asynchronous devices on any machine, with a checker for waits.

`load` gives the process the device type `fakeacc`. Its streams are threads, its kernels are
torch's CPU kernels, queued; copies, events, caching allocators, pinned memory, random state,
autograd over several devices and autocast behave as on a real accelerator. Code under test needs
to know nothing of it: it goes through `torch.accelerator`, `torch.Stream` and `torch.Event`.

Every queued task passes one place, which knows what comes before what. Two accesses to the same
bytes that nothing orders are a report, in every run and whatever the threads happen to do: a wait,
a `record_stream` or a wait of the host is missing.

The device type is global and final: a process that has loaded it has an accelerator from then on.
Tests that need it therefore run in a pytest process of their own.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch.utils import backend_registration

from .builder import BuildError, build, missing_requirement
from .device_module import DEVICE_TYPE, DeviceModule
from .native import Native, import_native

__all__ = [
    "DEVICE_TYPE",
    "BuildError",
    "Report",
    "allocated_bytes",
    "check_host_access",
    "checker",
    "clear_reports",
    "drain",
    "hold",
    "latency",
    "load",
    "memory_limit",
    "missing_requirement",
    "peak_bytes",
    "poison",
    "reports",
    "reset_peak_bytes",
]

CheckerMode = Literal["off", "collect", "raise"]


@dataclass(frozen=True)
class Report:
    """Two accesses to the same memory that nothing orders.

    Attributes:
        message: names both, where they run and the bytes they share.
        operation: the one that came second in the order of the calls.
        other: the one it does not wait for.
    """

    message: str
    operation: str
    other: str

    def __str__(self) -> str:
        return self.message


def load(num_devices: int = 2, sanitizer: str | None = None) -> ModuleType:
    """Builds the fake accelerator if need be and makes it the accelerator of this process.

    Intra-op threads are set to one: the streams are threads already.

    Args:
        num_devices: 0 to 8; final for the process.
        sanitizer: `"address"` for a build under AddressSanitizer.

    Returns:
        `torch.fakeacc`.

    Raises:
        BuildError: The compiler failed.
        RuntimeError: A requirement is missing (`missing_requirement` says which), or the process
            has loaded it with another number of devices.
    """
    loaded = _loaded()
    if loaded is None:
        if (problem := missing_requirement()) is not None:
            raise RuntimeError(problem)
        loaded = _register(import_native(build(sanitizer)), num_devices)
    if loaded.device_count() != num_devices:
        raise RuntimeError(
            f"this process has a fake accelerator of {loaded.device_count()} devices already, "
            f"{num_devices} are not to be had: use another process"
        )
    return loaded


def reports() -> list[Report]:
    """What the checker has found since the last `clear_reports`."""
    return [Report(*found) for found in _native().reports()]


def clear_reports() -> None:
    """Forgets the reports."""
    _native().clear_reports()


@contextlib.contextmanager
def checker(mode: CheckerMode) -> Iterator[None]:
    """Within it the checker is off, collects, or raises where the second access is launched.

    It collects otherwise. A free and an access of the host never raise.
    """
    native = _native()
    native.set_checker(mode)
    native.set_host_watch(mode != "off")
    try:
        yield
    finally:
        native.set_checker("collect")
        native.set_host_watch(True)


@contextlib.contextmanager
def latency(
    *,
    kernel_ms: float = 0.0,
    copy_ms: float = 0.0,
    copy_ms_per_mib: float = 0.0,
    jitter_ms: float = 0.0,
    seed: int = 0,
) -> Iterator[None]:
    """Within it, launched tasks take longer.

    Args:
        kernel_ms: more for every kernel.
        copy_ms: more for every copy between host and device or two devices.
        copy_ms_per_mib: the same, by size.
        jitter_ms: up to this much more for either, at random.
        seed: of the jitter, which follows the order of the launches.
    """
    native = _native()
    native.set_latency(kernel_ms, copy_ms, copy_ms_per_mib, jitter_ms, seed)
    try:
        yield
    finally:
        native.set_latency(0.0, 0.0, 0.0, 0.0, 0)


@contextlib.contextmanager
def hold(stream: torch.Stream) -> Iterator[None]:
    """Within it no task starts on the stream; what is launched there stays queued.

    A wait of the host for such a task cannot end: it raises after a minute.
    """
    native = _native()
    native.hold(stream.device.index, stream.stream_id)
    try:
        yield
    finally:
        native.release(stream.device.index, stream.stream_id)


@contextlib.contextmanager
def memory_limit(device: int, limit_bytes: int) -> Iterator[None]:
    """Within it the device has that much memory; more is a `torch.OutOfMemoryError`.

    Allocations count rounded up to 512 bytes. What is allocated already stays.
    """
    native = _native()
    before = native.set_limit_bytes(device, limit_bytes)
    try:
        yield
    finally:
        native.set_limit_bytes(device, before)


@contextlib.contextmanager
def poison(on: bool) -> Iterator[None]:
    """Within it, memory that nobody may read is filled with NaNs, or not. It is otherwise."""
    native = _native()
    native.set_poison(on)
    try:
        yield
    finally:
        native.set_poison(True)


def drain() -> None:
    """Waits until nothing is queued on any device.

    Raises:
        torch.AcceleratorError: A kernel failed and no wait of the host has raised that yet. The
            devices are idle all the same.
    """
    native = _native()
    with contextlib.ExitStack() as stack:  # every device, whatever the others raise
        for device in range(native.device_count()):
            stack.callback(native.synchronize_device, device)


def allocated_bytes(device: int) -> int:
    """Bytes of device memory in use: exactly those asked for, neither rounded nor cached."""
    return _native().requested_bytes(device)[0]


def peak_bytes(device: int) -> int:
    """The most that `allocated_bytes` has been since the last `reset_peak_bytes`.

    It depends on the program's order of allocations and frees only, not on the threads.
    """
    return _native().requested_bytes(device)[1]


def reset_peak_bytes(device: int) -> None:
    """Starts `peak_bytes` again from what is allocated now."""
    torch.accelerator.reset_peak_memory_stats(device)


def check_host_access(tensor: torch.Tensor, *, write: bool, what: str = "the test") -> None:
    """Tells the checker of an access that no torch operator makes, through numpy or a pointer."""
    if tensor.numel() > 0:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps)
        _native().check_host_access(what, tensor.data_ptr(), elements * tensor.itemsize, write)


def _loaded() -> DeviceModule | None:
    module = getattr(torch, DEVICE_TYPE, None)
    return module if isinstance(module, DeviceModule) else None


def _native() -> Native:
    loaded = _loaded()
    if loaded is None:
        raise RuntimeError("the fake accelerator is not loaded: call load() first")
    return loaded.native


def _register(native: Native, num_devices: int) -> DeviceModule:
    native.start(num_devices)
    torch.set_num_threads(1)
    module = DeviceModule(native)
    backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, module)
    backend_registration.generate_methods_for_privateuse1_backend()
    native.set_host_watch(True)
    process = os.getpid()

    def drain_at_exit() -> None:
        # A stream's thread must not be in the middle of a kernel when torch's libraries go. A
        # forked child has none of these threads.
        if os.getpid() == process:
            drain()

    atexit.register(drain_at_exit)
    return module
