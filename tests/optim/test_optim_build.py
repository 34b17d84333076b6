"""The package builds with and without a compiler, and what is built works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from roundpipe import optim
from roundpipe.optim.native import load_kernels
param = torch.zeros(1000, requires_grad=True)
published = torch.zeros(1000, dtype=torch.bfloat16)
for _ in range(2):
    bound = {param: optim.Binding(torch.ones(1000).bfloat16(), published)}
    optim.Adam([param], lr=0.5).step_fused(bound)
assert (published == -1).all(), published[:4]
print("kernels:", load_kernels() is not None)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A clean copy of what the package is built from."""
    copy = tmp_path / "sources"
    shutil.copytree(
        ROOT / "src",
        copy / "src",
        ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "build"),
    )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    return copy


def _run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _wheel(sources: Path, target: Path, **variables: str) -> Path:
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(target)]
    command = [sys.executable, "-m", "pip", "wheel", str(sources), *options]
    _run(command, sources, **variables)
    (wheel,) = target.glob("*.whl")
    return wheel


def _step_with(wheel: Path, folder: Path) -> list[str]:
    """The log of two steps with the wheel's files, and nothing of this tree."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return _run([sys.executable, "-c", STEP], folder, PYTHONPATH=str(folder)).splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_compiler_the_wheel_has_the_kernels_and_their_sources(
    sources: Path, tmp_path: Path
) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("this machine has no C++ compiler")
    wheel = _wheel(sources, tmp_path / "wheel")
    names = zipfile.ZipFile(wheel).namelist()
    assert len([name for name in names if name.startswith("roundpipe/optim/_kernels")]) == 1
    assert "roundpipe/optim/csrc/kernels.h" in names
    assert _step_with(wheel, tmp_path / "installed") == ["kernels: True"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_compiler_the_wheel_is_built_and_steps_with_torch(
    sources: Path, tmp_path: Path
) -> None:
    nothing = str(tmp_path / "no-such-compiler")
    wheel = _wheel(sources, tmp_path / "wheel", CC=nothing, CXX=nothing)
    assert not [n for n in zipfile.ZipFile(wheel).namelist() if "_kernels." in n]
    log = _step_with(wheel, tmp_path / "installed")
    assert log == [
        "roundpipe.optim runs torch's own optimizers on the CPU: the package was built without its "
        "compiled kernels",
        "kernels: False",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_source_distribution_has_all_sources(sources: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    _run([sys.executable, "-c", code], sources)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {Path(name).name for name in tar.getnames() if "/optim/csrc/" in name}
    written = {path.name for path in (ROOT / "src/roundpipe/optim/csrc").iterdir()}
    assert packed == written
    assert "kernels.h" in packed
