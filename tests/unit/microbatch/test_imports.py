"""Importing costs little: torch's spec classes and DTensor are fetched when they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import roundpipe
from roundpipe import microbatch

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import roundpipe.microbatch as microbatch
slow = ("torch.distributed.pipelining", "torch.distributed.tensor", "torch.nn.attention")
assert not [m for m in set(sys.modules) - before if m.startswith(slow)], "imported too much"
batch = microbatch.split_batch((torch.ones(4),), {}, torch.ones(4), 2)
microbatch.merge_outputs([m.args[0] for m in batch.microbatches])
assert not [m for m in set(sys.modules) - before if m.startswith(slow)], "imported too much later"
from roundpipe.microbatch import TensorChunkSpec
assert TensorChunkSpec is sys.modules["torch.distributed.pipelining.microbatch"].TensorChunkSpec
print("fine")
"""


def test_the_slow_modules_are_imported_only_when_they_are_needed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(roundpipe.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout == "fine\n", result.stderr


def test_everything_that_is_promised_is_there() -> None:
    for name in microbatch.__all__:
        assert getattr(microbatch, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        microbatch.nonsense  # noqa: B018
