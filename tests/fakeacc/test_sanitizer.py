"""The C++ side under AddressSanitizer. Slow: it needs a build of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sanitizer_program.py")
TESTS = Path(__file__).parents[1]


def sanitizer_libraries() -> list[str]:
    """What must be loaded first; libstdc++ too, or exceptions of torch pass the sanitizer by."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return []
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            return []
        found.append(path)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_memory_error_in_right_and_wrong_programs() -> None:
    libraries = sanitizer_libraries()
    if not libraries:
        reason = "the compiler has no libasan"
        if os.environ.get("CI"):
            pytest.fail(f"CI must run this test, but {reason}")
        pytest.skip(reason)
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the machine is leaked on purpose
        "PYTHONPATH": str(TESTS),
    }
    outcome = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    assert "AddressSanitizer" not in outcome.stderr
    assert outcome.stdout.strip() == "clean"
