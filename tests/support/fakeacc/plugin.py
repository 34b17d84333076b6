"""The fake accelerator in a pytest run: loaded before collection, no report after any test.

Only for a process that runs nothing else: the device type is there for good. `FAKEACC_DEVICES`
gives the number of devices. Any tests run on it with

    PYTHONPATH=tests python -m pytest -p support.fakeacc.plugin tests/devices
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import fakeacc

PLUGIN_NAME = "fakeacc"
DEVICES_VARIABLE = "FAKEACC_DEVICES"
DEFAULT_DEVICES = 2


class FakeAcceleratorPlugin:
    """Fixtures of a run on the fake accelerator.

    Attributes:
        problem: why there is no fake accelerator here; every test of the run is skipped then.
    """

    def __init__(self, problem: str | None) -> None:
        self.problem = problem

    @pytest.fixture(autouse=True)
    def _every_wait_is_there(self) -> Iterator[None]:
        if self.problem is not None:
            pytest.skip(self.problem)
        fakeacc.drain()
        fakeacc.clear_reports()
        yield
        fakeacc.drain()
        found = fakeacc.reports()
        fakeacc.clear_reports()
        if found:
            listed = "\n".join(f"- {report}" for report in found[:20])
            pytest.fail(f"{len(found)} unordered accesses to memory:\n{listed}", pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    """Where this module itself is the plugin, by `-p`."""
    if not is_active(config):
        activate(config, int(os.environ.get(DEVICES_VARIABLE, DEFAULT_DEVICES)))


def activate(config: pytest.Config, num_devices: int = DEFAULT_DEVICES) -> None:
    """Loads the fake accelerator and registers the plugin.

    Raises:
        pytest.UsageError: It cannot be had although `CI` is set: there it must not be skipped.
    """
    problem = fakeacc.missing_requirement()
    if problem is None:
        fakeacc.load(num_devices)
    elif os.environ.get("CI"):
        raise pytest.UsageError(f"no fake accelerator, but CI must run its tests: {problem}")
    config.pluginmanager.register(FakeAcceleratorPlugin(problem), PLUGIN_NAME)


def is_active(config: pytest.Config) -> bool:
    """Whether this run is on the fake accelerator."""
    return config.pluginmanager.has_plugin(PLUGIN_NAME)


def is_asked_for(config: pytest.Config, folder: Path) -> bool:
    """Whether the run consists of tests below `folder` and nothing else."""
    return bool(config.args) and all(
        folder in [path := Path(argument.split("::")[0]).resolve(), *path.parents]
        for argument in config.args
    )
