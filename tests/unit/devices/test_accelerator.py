"""What can be said about the accelerator back end without one; the contract suite has the rest."""

from __future__ import annotations

import logging

import pytest
import torch

from roundpipe.devices.accelerator import AcceleratorDevice, SharedGenerator, needs_host_pass
from roundpipe.devices.base import Stream
from roundpipe.errors import StateError


def test_dense_host_targets_are_filled_by_the_runtime_itself() -> None:
    source = torch.empty(4, 6)
    assert not needs_host_pass(torch.empty(4, 6), source)
    assert not needs_host_pass(torch.empty(4, 6, dtype=torch.float64), source)
    assert not needs_host_pass(torch.empty(2, 4, 6)[1], source)
    assert not needs_host_pass(torch.empty(6, 4).t(), torch.empty(6, 4).t())


def test_other_host_targets_are_filled_through_a_temporary() -> None:
    source = torch.empty(4, 6)
    assert needs_host_pass(torch.empty(4, 12)[:, ::2], source)
    assert needs_host_pass(torch.empty(4, 12)[:, ::2], torch.empty(4, 12)[:, ::2])
    assert needs_host_pass(torch.empty(6, 4).t(), source)
    assert needs_host_pass(torch.empty(6, 4).t(), torch.empty(6, 4, dtype=torch.float64).t())


def test_targets_on_a_device_never_are() -> None:
    assert not needs_host_pass(torch.empty(4, 12, device="meta")[:, ::2], torch.empty(4, 6))


class BrokenStream:
    """A stream of a device that has failed for good."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        raise RuntimeError("device-side assert triggered")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> AcceleratorDevice:
    monkeypatch.setattr(torch, "Stream", BrokenStream)
    place = torch.device("cpu")
    return AcceleratorDevice(0, "cuda:0", place, SharedGenerator(place, users=1))


def test_a_device_in_error_can_be_closed(
    broken: AcceleratorDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        broken.close()
    assert "cuda:0 reported an error while it was closed: device-side assert" in caplog.text
    with pytest.raises(StateError, match="cuda:0 was closed; open a new pool"):
        broken.torch_stream(Stream.COMPUTE)
    caplog.clear()
    broken.close()
    assert caplog.text == ""


def test_only_devices_that_share_a_generator_have_a_lock() -> None:
    place = torch.device("cpu")
    assert SharedGenerator(place, users=1).lock is None
    assert SharedGenerator(place, users=2).lock is not None
