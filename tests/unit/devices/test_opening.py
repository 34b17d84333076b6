"""Opening pools from what users say, and what pools do at both ends of their life."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import roundpipe.devices
from roundpipe.devices import CpuChecks, DevicePool, DeviceSpec, open_cpu_pool, open_pool
from roundpipe.devices.base import Device
from roundpipe.devices.cpu import CpuDevice
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError


@pytest.fixture(autouse=True)
def without_accelerator_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators that are named but not touched: opening gives CPU devices with their names."""

    def open_accelerators(named: list[torch.device]) -> list[Device]:
        devices: list[Device] = []
        for index, place in enumerate(named):
            device = CpuDevice(index, 1)
            device.name = str(place)
            devices.append(device)
        return devices

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="cuda")
    )
    monkeypatch.setattr(roundpipe.devices, "open_accelerators", open_accelerators)


def names(spec: DeviceSpec) -> list[str]:
    with open_pool(spec) as pool:
        return [device.name for device in pool.devices]


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (None, 2),
        ("auto", 2),
        ("cpu", 1),
        ("cpu:4", 4),
        (" cpu:3 ", 3),
        ("cpu,cpu,cpu", 3),
        ("cpu:0,cpu:1", 2),
        (["cpu", torch.device("cpu")], 2),
        ((torch.device("cpu"),), 1),
        (torch.device("cpu"), 1),
    ],
    ids=str,
)
def test_cpu_devices(spec: DeviceSpec, count: int) -> None:
    assert names(spec) == [f"cpu:{index}" for index in range(count)]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (None, ["cuda:0", "cuda:1"]),
        ("auto", ["cuda:0", "cuda:1"]),
        ("accelerator", ["cuda:0", "cuda:1"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:0,cuda:0", ["cuda:0", "cuda:0"]),
        ([torch.device("cuda:1"), "cuda:0"], ["cuda:1", "cuda:0"]),
        ("cpu:2", ["cpu:0", "cpu:1"]),
    ],
    ids=str,
)
def test_accelerators(spec: DeviceSpec, want: list[str]) -> None:
    assert names(spec) == want


@pytest.mark.parametrize("spec", [None, "auto"])
def test_the_variable_says_what_there_is_without_accelerators(
    spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:3")
    assert len(names(spec)) == 3
    assert len(names("cpu")) == 1
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "auto")
    assert len(names(spec)) == 2
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "")
    assert len(names(spec)) == 2


@pytest.mark.usefixtures("two_gpus")
def test_the_variable_wins_over_the_default_and_not_over_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:3")
    assert names(None) == ["cpu:0", "cpu:1", "cpu:2"]
    assert names("auto") == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("cpu:x", InvalidValueError, r"devices='cpu:x': 'x' is not a number; expected 'auto'"),
        ("cpu:0", InvalidValueError, "0 CPU devices were asked for; at least 1 is needed"),
        ("cpu:-1", InvalidValueError, "'-1' is not a number"),
        ("quantum", InvalidValueError, "'quantum' is no device; expected"),
        ("", InvalidValueError, "'' is no device; expected"),
        ([], InvalidValueError, "an empty list; expected"),
        ("cuda:0", InvalidValueError, "names 'cuda:0', but this PyTorch sees no accelerator; name"),
        ("accelerator", InvalidValueError, "sees no accelerator; install the build for your"),
        ("cpu,cuda", InvalidValueError, "mixes cpu and cuda; a pool has devices of one kind"),
        (3, InvalidTypeError, "devices=3 has type int; expected"),
        (["cpu", 3], InvalidTypeError, "has an entry of type int; expected"),
    ],
    ids=str,
)
def test_what_cannot_be_opened_is_refused_with_what_can(
    spec: DeviceSpec, error: type[Exception], text: str
) -> None:
    before = threading.active_count()
    with pytest.raises(error, match=text):
        open_pool(spec)
    assert threading.active_count() == before


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("spec", ["cuda:2", "xpu:0"])
def test_an_accelerator_that_is_not_there_is_refused_with_those_that_are(spec: str) -> None:
    with pytest.raises(InvalidValueError, match=f"names '{spec}', but this PyTorch sees cuda:0, c"):
        open_pool(spec)


def test_a_pool_is_returned_as_it_is() -> None:
    with open_cpu_pool(1) as pool:
        assert open_pool(pool) is pool


@pytest.mark.parametrize("checks", [None, CpuChecks()], ids=["fast", "checked"])
def test_cpu_devices_share_the_cores(
    checks: CpuChecks | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roundpipe.devices, "visible_cores", lambda: 7)
    for count, threads in [(1, 7), (3, 2), (9, 1)]:
        pool = open_cpu_pool(count) if checks is None else open_cpu_pool(count, checks)
        with pool:
            for device in pool.devices:
                assert isinstance(device, CpuDevice)
                assert device.intraop_threads == threads


@pytest.mark.parametrize("count", [0, -2])
def test_a_pool_of_no_devices_is_refused(count: int) -> None:
    with pytest.raises(InvalidValueError, match=f"{count} CPU devices were asked for"):
        open_cpu_pool(count)


class Unenterable(CpuDevice):
    @contextlib.contextmanager
    def worker_scope(self) -> Iterator[None]:
        raise OSError("the driver is gone")
        yield


def test_a_device_whose_worker_cannot_start_is_an_error_of_the_opening() -> None:
    before = threading.active_count()
    with pytest.raises(OSError, match="the driver is gone"):
        DevicePool([CpuDevice(0, 1), Unenterable(1, 1)])
    assert threading.active_count() == before


def test_a_closed_pool_takes_no_tasks() -> None:
    pool = open_cpu_pool(2)
    ran = threading.Event()
    pool.submit({1: ran.set})
    pool.close()
    assert ran.is_set()
    assert pool.closed
    with pytest.raises(StateError, match="the devices were closed"):
        pool.submit({0: ran.set})


def test_importing_opens_nothing_and_the_interpreter_ends_although_pools_are_open() -> None:
    code = """if True:
        import threading
        from roundpipe.devices import CpuChecks, open_cpu_pool
        print(threading.active_count())
        fast, checked = open_cpu_pool(2), open_cpu_pool(2, CpuChecks())
        print(threading.active_count())
    """
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    # Two workers each, and three copy threads for each checked device.
    assert done.stdout.split() == ["1", "11"]
    assert done.stderr == ""
