"""A training call with a large vocabulary never holds all logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VOCABULARY, TOKENS = 128_000, 4096


def measured(head: str) -> dict[str, float]:
    program = Path(__file__).parent / "head_memory.py"
    command = [sys.executable, str(program), str(VOCABULARY), str(TOKENS), head]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    values: dict[str, float] = json.loads(done.stdout)
    return values


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_head_takes_a_fraction_of_the_logits() -> None:
    chunked, library = measured("chunked"), measured("library")
    assert chunked["loss"] == pytest.approx(library["loss"], rel=1e-6)
    assert chunked["peak_bytes"] < 0.15 * 4 * VOCABULARY * TOKENS
