"""DTensors are cut within each rank's shard, or aligned; checked with real process groups."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.dtensor import cut_dtensor
from roundpipe.microbatch.row_exchange import rows_of_pieces, rows_of_whole
from roundpipe.microbatch.sizes import chunk_sizes, even_sizes, nested_chunk_sizes, spans
from unit.microbatch import dtensor_program

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def _run(rank: int, world: int, store_path: str, failures: Any) -> None:
    try:
        dtensor_program.run(rank, world, store_path)
    except BaseException:
        failures.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise


@needs_gloo
@pytest.mark.parametrize("world", [1, 2, 4])
def test_dtensors_over_processes(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One server imports torch once; the ranks are forks of it. It looks for modules in PYTHONPATH.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([dtensor_program.__name__, "torch._dynamo"])
    failures = context.SimpleQueue()
    arguments = [(rank, world, str(tmp_path / "store"), failures) for rank in range(world)]
    processes = [context.Process(target=_run, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    texts = [] if failures.empty() else [failures.get()]
    assert [process.exitcode for process in processes] == [0] * world, "\n".join(texts)


def test_pieces_that_would_be_no_dtensors_are_refused() -> None:
    """Seven rows over 2 x 3 ranks: 2, 1, 1, 1, 1, 1. Their halves are no such sharding."""
    sharded = SimpleNamespace(is_shard=lambda dim: dim == 0)
    mesh = SimpleNamespace(size=lambda dim: (2, 3)[dim], get_local_rank=lambda dim: 0)
    tensor = SimpleNamespace(
        shape=(7,), placements=[sharded] * 2, device_mesh=mesh, to_local=lambda: torch.ones(2)
    )
    text = r"args\[0\] has 7 entries along dimension 0, .* sizes \[2, 3\]; .* a multiple of 6"
    with pytest.raises(InvalidValueError, match=text):
        cut_dtensor(tensor, 0, 2, False, "args[0]")


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 8))
def test_parts_of_shards_are_shards_of_parts(total: int, ranks: int, count: int) -> None:
    """So every piece of a sharded tensor is a DTensor of the usual layout, of some size."""
    cuts = zip(*(even_sizes(size, count) for size in chunk_sizes(total, ranks)), strict=True)
    for cut in cuts:
        assert list(cut) == chunk_sizes(sum(cut), ranks)


@given(st.integers(1, 8), st.integers(1, 8), st.lists(st.integers(1, 3), max_size=3))
def test_so_they_are_with_several_mesh_dimensions_if_the_size_is_a_multiple(
    multiple: int, count: int, ranks: list[int]
) -> None:
    shards = nested_chunk_sizes(multiple * math.prod(ranks), ranks)
    assert len(shards) == math.prod(ranks)
    for cut in zip(*(even_sizes(size, count) for size in shards), strict=True):
        assert list(cut) == nested_chunk_sizes(sum(cut), ranks)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_every_row_is_held_once_in_both_distributions(total: int, ranks: int, count: int) -> None:
    whole = rows_of_whole(chunk_sizes(total, ranks))
    pieces = rows_of_pieces(even_sizes(total, count), ranks)
    for held in (whole, pieces):
        assert len(held) == ranks
        assert sorted(row for rows in held for row in rows.tolist()) == list(range(total))
    # Seen piece by piece, the ranks in order hold the rows of torch.tensor_split, in order.
    for start, size in spans(even_sizes(total, count)):
        rows = [row for held in pieces for row in held.tolist() if start <= row < start + size]
        assert rows == list(range(start, start + size))
