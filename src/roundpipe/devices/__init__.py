"""Devices: opening a pool of them from what a user says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias, overload

import torch

from roundpipe.errors import InvalidTypeError, InvalidValueError

from .accelerator import open_accelerators
from .base import Device
from .checked import CheckedPool, open_checked_pool
from .cpu import CpuDevice, visible_cores
from .pool import DevicePool
from .script import CopyInfo, CpuChecks, Hold

__all__ = [
    "CheckedPool",
    "CopyInfo",
    "CpuChecks",
    "DevicePool",
    "DeviceSpec",
    "Hold",
    "open_cpu_pool",
    "open_pool",
]

DeviceSpec: TypeAlias = "str | torch.device | Sequence[str | torch.device] | DevicePool | None"

_DEFAULT_CPU_DEVICES = 2
_VARIABLE = "ROUNDPIPE_DEVICES"
_EXPECTED = (
    "expected 'auto', 'accelerator', 'cpu', a number of CPU devices as 'cpu:4', accelerators as "
    "'cuda:0,cuda:1' or as a list of torch.device, or a DevicePool"
)


def open_pool(spec: DeviceSpec = None) -> DevicePool:
    """Open the devices that ``spec`` names, each with its worker thread.

    Args:
        spec: ``None`` takes the environment variable ``ROUNDPIPE_DEVICES``, else ``"auto"``.
            ``"auto"`` is all visible accelerators, or without any what the variable says, else two
            CPU devices. ``"accelerator"`` is all visible accelerators. ``"cpu:4"`` is four CPU
            devices, ``"cpu"`` one. ``"cuda:0,cuda:1"``, or a list of strings or ``torch.device``,
            names one device per entry; an accelerator named twice becomes two logical devices that
            share it. A pool is returned as it is.

    Raises:
        InvalidTypeError: ``spec`` is none of these.
        InvalidValueError: it names a device that does not exist, or mixes kinds.
    """
    if isinstance(spec, DevicePool):
        return spec
    return DevicePool(_devices(spec))


@overload
def open_cpu_pool(count: int) -> DevicePool: ...


@overload
def open_cpu_pool(count: int, checks: CpuChecks) -> CheckedPool: ...


def open_cpu_pool(count: int, checks: CpuChecks | None = None) -> DevicePool:
    """Open ``count`` CPU devices that share the visible cores evenly.

    Args:
        count: how many.
        checks: make them asynchronous, watched and scriptable, for tests.

    Raises:
        InvalidValueError: ``count`` is not positive.
    """
    if checks is None:
        return DevicePool(_cpu_devices(count))
    return open_checked_pool(count, _intraop_threads(count), checks)


def _devices(spec: object) -> list[Device]:
    if spec is None:
        spec = os.environ.get(_VARIABLE) or "auto"
    if isinstance(spec, str):
        return _devices_of_string(spec.strip())
    if isinstance(spec, torch.device):
        return _devices_of_list([spec])
    if isinstance(spec, (list, tuple)):
        return _devices_of_list([_torch_device(entry, spec) for entry in spec])
    raise InvalidTypeError(f"devices={spec!r} has type {type(spec).__name__}; {_EXPECTED}")


def _devices_of_string(spec: str) -> list[Device]:
    if spec == "auto":
        return _auto()
    if spec == "accelerator":
        return [*open_accelerators(_visible_accelerators())]
    kind, _, count = spec.partition(":")
    if kind == "cpu" and "," not in spec:
        if count and not count.isdecimal():
            raise InvalidValueError(f"devices={spec!r}: {count!r} is not a number; {_EXPECTED}")
        return _cpu_devices(int(count or 1))
    return _devices_of_list([_torch_device(entry.strip(), spec) for entry in spec.split(",")])


def _auto() -> list[Device]:
    if torch.accelerator.is_available():
        return [*open_accelerators(_visible_accelerators())]
    variable = os.environ.get(_VARIABLE) or "auto"
    return _cpu_devices(_DEFAULT_CPU_DEVICES) if variable == "auto" else _devices(variable)


def _visible_accelerators() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        raise InvalidValueError(
            "devices='accelerator', but this PyTorch sees no accelerator; install the build for "
            "your hardware, or use 'cpu:2' (CPU devices) or 'auto'"
        )
    count = torch.accelerator.device_count()
    return [torch.device(accelerator.type, index) for index in range(count)]


def _torch_device(entry: object, spec: object) -> torch.device:
    if isinstance(entry, torch.device):
        return entry
    if not isinstance(entry, str):
        raise InvalidTypeError(
            f"devices={spec!r} has an entry of type {type(entry).__name__}; {_EXPECTED}"
        )
    try:
        return torch.device(entry)
    except RuntimeError as error:
        raise InvalidValueError(f"devices={spec!r}: {entry!r} is no device; {_EXPECTED}") from error


def _devices_of_list(named: list[torch.device]) -> list[Device]:
    if not named:
        raise InvalidValueError(f"devices is an empty list; {_EXPECTED}")
    kinds = sorted({device.type for device in named})
    if len(kinds) > 1:
        raise InvalidValueError(
            f"devices mixes {' and '.join(kinds)}; a pool has devices of one kind, open a pool each"
        )
    if kinds == ["cpu"]:
        return _cpu_devices(len(named))
    for device in named:
        _check_accelerator(device)
    return [*open_accelerators(named)]


def _check_accelerator(device: torch.device) -> None:
    visible = _visible_accelerators() if torch.accelerator.is_available() else []
    # A device without an index is the current one of its kind.
    exists = any(device.type == v.type and device.index in (None, v.index) for v in visible)
    if not exists:
        there = ", ".join(map(str, visible)) or "no accelerator"
        raise InvalidValueError(
            f"devices names '{device}', but this PyTorch sees {there}; name one of those, or use "
            "'cpu:2' (CPU devices) or 'auto'"
        )


def _cpu_devices(count: int) -> list[Device]:
    threads = _intraop_threads(count)
    return [CpuDevice(index, threads) for index in range(count)]


def _intraop_threads(count: int) -> int:
    if count < 1:
        raise InvalidValueError(f"{count} CPU devices were asked for; at least 1 is needed")
    return max(1, visible_cores() // count)
