"""Builds the C++ side of the fake accelerator, once per source, torch and Python version.

The compiler is called directly: what it needs is a handful of flags, and a build that moves one
finished file into its place cannot be seen half done by another process.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

MODULE_NAME = "_fakeacc"
SUPPORTED_TORCH = "2.13"

_SOURCES = Path(__file__).parent / "csrc"
_CACHE = Path(__file__).parents[3] / ".cache" / "fakeacc"

# Most of the build time goes into torch's headers, so all sources that need them are one unit.
# The headers of autocast are as big again, and are compiled beside it.
_UNITS = {
    "autocast": ("autocast",),
    "torch_side": (
        "device",
        "allocators",
        "generator",
        "tensors",
        "shadows",
        "cpu_call",
        "fallback",
        "kernels",
        "host_watch",
        "module",
    ),
    "hardware": ("stream", "checker", "memory", "machine", "host_wait"),
}

# Memory is no concern for units of this size, and collecting it takes gcc a quarter of the time.
_GCC_MEMORY = ("--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=4000000")


class BuildError(RuntimeError):
    """The compiler refused the sources; the message holds what it said."""


def missing_requirement() -> str | None:
    """What keeps the fake accelerator from being built here, or None."""
    if sys.platform != "linux":
        return f"the fake accelerator was tried on Linux only, this is {sys.platform}"
    if not torch.__version__.startswith(SUPPORTED_TORCH + "."):
        return (
            f"the fake accelerator is written for torch {SUPPORTED_TORCH}, not {torch.__version__}"
        )
    if shutil.which(_compiler()) is None:
        return f"the fake accelerator needs a C++20 compiler, and there is no {_compiler()}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the fake accelerator needs the headers of Python, and there is no Python.h"
    return None


def build(sanitizer: str | None = None) -> Path:
    """The extension module, built if need be.

    Args:
        sanitizer: `"address"` for a build under AddressSanitizer.

    Raises:
        BuildError: The compiler failed.
    """
    extra = [] if sanitizer is None else [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    target = _CACHE / _cache_key(extra) / f"{MODULE_NAME}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
            built = _compile(Path(folder), extra)
            built.replace(target)
    return target


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache_key(extra: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(_SOURCES.iterdir())]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    for fact in (torch.__version__, sys.version, _compiler(), *extra):
        digest.update(fact.encode())
    return digest.hexdigest()[:16]


def _compile(folder: Path, extra: Sequence[str]) -> Path:
    for name, sources in _UNITS.items():
        text = "".join(f'#include "{source}.cpp"\n' for source in sources)
        (folder / f"unit_{name}.cpp").write_text(text)
    # Object by object in parallel, as many at a time as the environment allows.
    jobs = int(os.environ.get("MAX_JOBS", "2"))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        objects = list(pool.map(lambda name: _compile_unit(folder, name, extra), _UNITS))
    library = folder / f"{MODULE_NAME}.so"
    torch_libraries = Path(torch.__file__).parent / "lib"
    _run(
        [
            *(_compiler(), "-shared", *extra, *map(str, objects), "-o", str(library)),
            *(f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"),
            *("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"),
        ]
    )
    return library


def _compile_unit(folder: Path, name: str, extra: Sequence[str]) -> Path:
    target = folder / f"{name}.o"
    include = Path(torch.__file__).parent / "include"
    _run(
        [
            *(_compiler(), "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
            # The wrappers of autocast are many and run seldom.
            "-O0" if name == "autocast" else "-O1",
            *extra,
            *(_GCC_MEMORY if Path(_compiler()).name.startswith("g++") else ()),
            # torch's own builds have it, and some of its classes have other members without.
            "-DNDEBUG",
            f"-DTORCH_EXTENSION_NAME={MODULE_NAME}",
            f"-I{_SOURCES}",
            *("-isystem", str(include)),
            *("-isystem", str(include / "torch" / "csrc" / "api" / "include")),
            *("-isystem", sysconfig.get_paths()["include"]),
            *("-c", str(folder / f"unit_{name}.cpp"), "-o", str(target)),
        ]
    )
    return target


def _run(command: Sequence[str]) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise BuildError(f"{' '.join(command)}\nfailed with\n{outcome.stderr[:8000]}")
