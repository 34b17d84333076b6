"""Tests of the fake accelerator, in a pytest process of their own: `pytest tests/fakeacc`."""

from pathlib import Path

import pytest

from support.fakeacc import plugin


def pytest_configure(config: pytest.Config) -> None:
    if plugin.is_asked_for(config, Path(__file__).parent) and not plugin.is_active(config):
        plugin.activate(config)  # two devices, whatever the environment says


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Part of a bigger run: those tests must not find an accelerator.
    return None if plugin.is_active(config) else True
