"""What every process of the DTensor tests runs: one process group, many checks.

A failed check raises, which the test that started the processes reports.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from roundpipe import microbatch
from roundpipe.errors import InvalidValueError


def run(rank: int, world: int, store_path: str) -> None:
    """Join the process group and run all checks."""
    torch.set_num_threads(1)
    method = f"file://{store_path}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    try:
        if world == 1:
            labels_of_one_process(init_device_mesh("cpu", (1,)))
            return
        line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        pieces_keep_mesh_and_placements(line, grid)
        aligned_pieces_are_those_of_an_unsharded_run(line, grid)
        gradients_flow(line)
        other_values_beside_a_dtensor(line)
        batches(line, world)
        refusals(line, grid, world)
    finally:
        dist.destroy_process_group()


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def split(tensor: torch.Tensor, count: int, dim: int = 0, align: bool = False) -> list[Any]:
    spec = (microbatch.TensorChunkSpec(dim),)
    args, _ = microbatch.split_args_kwargs_into_chunks((tensor,), None, count, spec, align=align)
    return args


def merged(pieces: list[Any], dim: int = 0, align: bool = False) -> Any:
    return microbatch.merge_chunks(pieces, (microbatch.TensorChunkSpec(dim),), align=align)[0]


def assert_same(a: Any, b: Any) -> None:
    assert isinstance(a, DTensor)
    assert (a.shape, a.placements, a.device_mesh) == (b.shape, b.placements, b.device_mesh)
    assert a.dtype == b.dtype
    assert torch.equal(a.to_local(), b.to_local())


def labels_of_one_process(mesh: DeviceMesh) -> None:
    """Cutting such a label with ``torch.tensor_split`` would silently gather it."""
    label = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    x = torch.ones(4, 1)
    for batch in (
        microbatch.split_batch((x,), {}, label, 2),
        microbatch.split_batch((label,), {}, label, 2),
    ):
        labels = [m.label for m in batch.microbatches]
        assert [piece.placements for piece in labels] == [(Shard(0),)] * 2
        assert [piece.to_local().tolist() for piece in labels] == [[0, 1], [2, 3]]
        assert [piece.shape for piece in labels] == [(2,), (2,)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = microbatch.split_batch((label,), {}, label, 8)
    assert "4 rows" in str(caught[0].message)
    assert "num_microbatch=8" in str(caught[0].message)
    assert [m.label.to_local().tolist() for m in batch.microbatches] == [[0], [1], [2], [3]]


def pieces_keep_mesh_and_placements(line: DeviceMesh, grid: DeviceMesh) -> None:
    cases: list[tuple[DeviceMesh, Sequence[Any], torch.Tensor, int]] = [
        (line, [Shard(0)], numbered(12, 3), 0),
        (line, [Shard(0)], numbered(14), 0),  # uneven shards
        (line, [Shard(1)], numbered(3, 12), 1),
        (line, [Shard(1)], numbered(4, 8), 0),  # cut where it is not sharded
        (line, [Replicate()], numbered(5, 2), 0),
        (grid, [Shard(0), Replicate()], numbered(8, 4), 0),
        (grid, [Shard(0), Shard(1)], numbered(8, 4), 0),
        (grid, [Shard(0), Shard(0)], numbered(16, 2), 0),
    ]
    for mesh, placements, whole, dim in cases:
        tensor = distribute_tensor(whole, mesh, placements)
        for count in (1, 2, 3):
            pieces = split(tensor, count, dim)
            parts = torch.tensor_split(tensor.to_local(), count, dim)
            for (piece,), part in zip(pieces, parts, strict=True):
                assert piece.placements == tensor.placements
                assert piece.device_mesh == mesh
                assert torch.equal(piece.to_local(), part)
            assert_same(merged(pieces, dim), tensor)
        if placements == [Shard(0)]:  # the sizes are right: gathering finds every row once
            rows = torch.cat([piece.full_tensor() for (piece,) in split(tensor, 2)])
            assert sorted(rows.flatten().tolist()) == whole.flatten().tolist()


def aligned_pieces_are_those_of_an_unsharded_run(line: DeviceMesh, grid: DeviceMesh) -> None:
    cases: list[tuple[DeviceMesh, Sequence[Any], torch.Tensor, int]] = [
        (line, [Shard(0)], numbered(8, 3), 0),
        (line, [Shard(0)], numbered(11) % 2 == 0, 0),
        (line, [Shard(1)], numbered(2, 9).to(torch.bfloat16), 1),
        (line, [Replicate()], numbered(5, 2), 0),
        (grid, [Shard(0), Replicate()], numbered(10, 2).to(torch.complex64), 0),
        (line, [Shard(0)], torch.ones(6, 0), 0),
    ]
    for mesh, placements, whole, dim in cases:
        tensor = distribute_tensor(whole, mesh, placements)
        pieces = split(tensor, 3, dim, align=True)
        for (piece,), expected in zip(pieces, whole.tensor_split(3, dim), strict=True):
            assert piece.placements == tensor.placements
            assert torch.equal(piece.full_tensor(), expected)
        assert_same(merged(pieces, dim, align=True), tensor)


def gradients_flow(line: DeviceMesh) -> None:
    plain = torch.linspace(1, 2, 14).view(7, 2).requires_grad_()
    loss = sum(((m + 1) * part**2).sum() for m, part in enumerate(plain.tensor_split(3)))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    tensor = distribute_tensor(plain.detach(), line, [Shard(0)]).requires_grad_()
    pieces = split(tensor, 3, align=True)
    back = merged([(((m + 1) * piece**2),) for m, (piece,) in enumerate(pieces)], align=True)
    total = back.sum()
    assert isinstance(total, DTensor)
    total.full_tensor().backward()
    assert isinstance(tensor.grad, DTensor)
    torch.testing.assert_close(tensor.grad.full_tensor(), plain.grad)


def other_values_beside_a_dtensor(line: DeviceMesh) -> None:
    tensor = distribute_tensor(numbered(8), line, [Shard(0)])
    same = distribute_tensor(torch.tensor(3), line, [Replicate()])
    args, kwargs = microbatch.split_args_kwargs_into_chunks((tensor, 5), {"same": same}, 2)
    assert [a[1] for a in args] == [5, 5]
    assert kwargs[1]["same"] is same
    assert microbatch.merge_chunks(kwargs, {"same": microbatch.Replicate})["same"] is same
    copies = [distribute_tensor(numbered(4), line, [Shard(0)]) for _ in range(2)]
    assert microbatch.merge_outputs(copies, microbatch.Replicate) is copies[0]


def batches(line: DeviceMesh, world: int) -> None:
    """The engine's own split: labels stay sharded, rows are counted over all ranks."""
    whole = numbered(4 * world, 1)
    tensor = distribute_tensor(whole, line, [Shard(0)])
    batch = microbatch.split_batch((tensor,), {}, tensor, 3)
    assert [m.rows for m in batch.microbatches] == [2 * world, world, world]
    assert batch.rows == 4 * world
    for m in batch.microbatches:
        assert m.label.placements == (Shard(0),)
    assert_same(microbatch.merge_outputs([m.args[0] for m in batch.microbatches]), tensor)


def refusals(line: DeviceMesh, grid: DeviceMesh, world: int) -> None:
    tensor = distribute_tensor(numbered(2 * world), line, [Shard(0)])
    refuses("dimension 0 has size 2 in its largest shard, fewer than", lambda: split(tensor, 3))
    refuses("or align=True, or give Replicate", lambda: split(tensor, 3))
    assert len(split(tensor, 3, align=True)) == 3  # enough of them together
    odd = DTensor.from_local(
        torch.ones(1 if line.get_local_rank() else 3),
        line,
        [Shard(0)],
        shape=torch.Size([4]),
        stride=(1,),
    )
    if line.get_local_rank() == 0:
        refuses("this rank should hold", lambda: split(odd, 1))
    if world == 4:
        both = distribute_tensor(numbered(8), grid, [Shard(0), Shard(0)])
        refuses("align=True works with one", lambda: split(both, 2, align=True))
        pieces = split(both, 2)
        refuses("align=True works with one", lambda: merged(pieces, align=True))
    piece = split(tensor, 2)[0][0]
    whole = distribute_tensor(numbered(world), line, [Replicate()])
    refuses("or another mesh; redistribute", lambda: merged([(piece,), (whole,)]))
    refuses("DTensors in all of them or in none", lambda: merged([(piece,), (numbered(world),)]))
    refuses(
        "a DTensor can only be cut evenly",
        lambda: microbatch.split_batch(
            (),
            {},
            distribute_tensor(numbered(4), line, [Replicate()]),
            2,
            split_input=lambda *_: ([(torch.ones(1),), (torch.ones(3),)], [{}, {}]),
        ),
    )


def refuses(text: str, function: Callable[[], Any]) -> None:
    with pytest.raises(InvalidValueError, match=re.escape(text)):
        function()
