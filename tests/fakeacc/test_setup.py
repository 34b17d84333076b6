"""Building and loading, and the pytest plugin that fails a test for a report."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from support import fakeacc
from support.fakeacc import builder, plugin

TESTS = Path(__file__).parents[1]

PLANTED = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.fakeacc import plugin

def pytest_configure(config):
    plugin.activate(config)
"""
GOOD_AND_BAD = """
import torch

def race(wait):
    one, two = torch.Stream("fakeacc:0"), torch.Stream("fakeacc:0")
    with one:
        x = torch.zeros(4, device="fakeacc:0")
    if wait:
        two.wait_stream(one)
    with two:
        x += 1
    one.wait_stream(two)

def test_good():
    race(wait=True)

def test_bad():
    race(wait=False)

def test_good_again():
    race(wait=True)
"""


def fake_config() -> pytest.Config:
    return cast(pytest.Config, SimpleNamespace(pluginmanager=pytest.PytestPluginManager()))


def test_a_build_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_compile", lambda *_: pytest.fail("nothing has changed"))
    assert builder.build().exists()


def test_a_build_that_fails_says_what_the_compiler_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "_CACHE", tmp_path)
    monkeypatch.setattr(builder, "_SOURCES", tmp_path)
    monkeypatch.setattr(builder, "_UNITS", {"hardware": ("missing",)})
    with pytest.raises(fakeacc.BuildError, match=r"failed with\n[\s\S]*missing.cpp: No such file"):
        builder.build()
    assert not list(tmp_path.rglob("*.so"))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fakeacc.missing_requirement() is None
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert "there is no no-such-compiler" in str(fakeacc.missing_requirement())
    with monkeypatch.context() as patch:
        patch.setattr(builder, "SUPPORTED_TORCH", "9.9")
        assert "is written for torch 9.9, not" in str(fakeacc.missing_requirement())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "on Linux only, this is darwin" in str(fakeacc.missing_requirement())
    with monkeypatch.context() as patch:
        patch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
        assert "there is no Python.h" in str(fakeacc.missing_requirement())


def test_loading_without_a_requirement_or_using_it_unloaded_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fakeacc, "_loaded", lambda: None)
    with pytest.raises(RuntimeError, match=r"not loaded: call load\(\) first"):
        fakeacc.reports()
    monkeypatch.setattr(fakeacc, "missing_requirement", lambda: "there is no compiler")
    with pytest.raises(RuntimeError, match="there is no compiler"):
        fakeacc.load(2)


def test_it_is_skipped_where_it_cannot_be_built_but_not_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fakeacc, "missing_requirement", lambda: "there is no compiler")
    monkeypatch.delenv("CI", raising=False)
    config = fake_config()
    plugin.activate(config)
    assert plugin.is_active(config)
    registered = config.pluginmanager.get_plugin(plugin.PLUGIN_NAME)
    assert isinstance(registered, plugin.FakeAcceleratorPlugin)
    assert registered.problem == "there is no compiler"
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.UsageError, match="CI must run its tests: there is no compiler"):
        plugin.activate(fake_config())


def test_a_report_fails_its_test_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLANTED)
    (tmp_path / "test_planted.py").write_text(GOOD_AND_BAD)
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed, 1 error" in outcome.stdout, outcome.stdout + outcome.stderr
    assert "ERROR test_planted.py::test_bad" in outcome.stdout
    assert "unordered accesses to memory" in outcome.stdout
