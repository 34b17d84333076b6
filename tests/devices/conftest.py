"""One suite for all back ends: each test runs once per back end that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from roundpipe.devices import CpuChecks, DevicePool
from support.backends import Accelerator, Backend, CheckedCpu, FastCpu


def _accelerator() -> Backend:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator is visible")
    return Accelerator()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": FastCpu,
    "cpu-checked": CheckedCpu,
    "cpu-checked-late": lambda: CheckedCpu(CpuChecks(delay_seed=1, max_delay_s=0.001)),
    "accelerator": _accelerator,
}


@pytest.fixture(
    params=[pytest.param(n, marks=[pytest.mark.gpu] * (n == "accelerator")) for n in BACKENDS]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = BACKENDS[request.param]()
    yield made
    if isinstance(made, CheckedCpu):
        # Every contract test is a correct program unless it says otherwise by its own check.
        assert [report for pool in made.pools for report in pool.reports()] == []


@pytest.fixture
def pool(backend: Backend) -> Iterator[DevicePool]:
    with backend.open(2) as opened:
        yield opened
