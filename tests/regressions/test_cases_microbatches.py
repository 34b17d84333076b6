"""Cases about splitting and merging that went wrong in public, each told above its test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.modeling_outputs import CausalLMOutput

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.microbatch import split_batch
from support.cases import STAGES, Scale, fused_plan, grad_of, stage_ranges

# A batch of 8 in three microbatches makes pieces of 3, 3 and 2 rows. A pipeline sized its later
# stages by the first piece, so the last one came out a row too long and the loss failed. A mean per
# piece and a mean over the batch also differ here, so what is promised must hold for every cut.


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    ("reduction", "loss", "first", "second"),
    [("sum", 168.0, 84.0, 56.0), ("mean", 21.0, 10.5, 7.0)],
)
def test_uneven_microbatches(
    stages: int, reduction: str, loss: float, first: float, second: float
) -> None:
    layers = [Scale(2.0), Scale(3.0)]
    model = nn.Sequential(*layers, nn.Identity(), nn.Identity())
    x = torch.arange(8.0).view(8, 1)

    def loss_fn(output: torch.Tensor, _label: Any) -> torch.Tensor:
        return output.sum() if reduction == "sum" else output.mean()

    config = RoundPipeRunConfig(
        num_microbatch=3, execute_plan=fused_plan(4, stages), loss_reduction=reduction
    )
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        got, output = pipe.forward_backward((x,), loss_fn=loss_fn, return_outputs=True)
        pipe.synchronize()
    assert torch.equal(output, 6 * x)
    assert got.item() == pytest.approx(loss)
    assert grad_of(layers[0]) == pytest.approx(first)
    assert grad_of(layers[1]) == pytest.approx(second)


# With fewer rows than microbatches one schedule hung, and another sliced past the end and ran
# layers on empty pieces. We run with as many microbatches as there are rows, and say so.


@pytest.mark.parametrize(("num_microbatch", "stages"), [(4, 1), (4, 3), (1, 3)])
def test_fewer_rows_than_microbatches(num_microbatch: int, stages: int) -> None:
    shapes: list[int] = []
    layers = [Scale(2.0) for _ in range(3)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _m, args: shapes.append(args[0].shape[0]))
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=fused_plan(3, stages))
    x = torch.tensor([[1.0], [2.0]])

    def call(pipe: RoundPipe) -> Any:
        return pipe.forward_backward(
            (x,), loss_fn=lambda out, _label: out.sum(), return_outputs=True
        )

    with RoundPipe(nn.Sequential(*layers), devices="cpu:4", model_run_config=config) as pipe:
        if num_microbatch == 4:
            with pytest.warns(UserWarning, match=r"2 rows.*fewer than num_microbatch=4"):
                loss, output = call(pipe)
        else:
            loss, output = call(pipe)
        pipe.synchronize()
    assert output.tolist() == [[8.0], [16.0]]
    assert loss.item() == 24.0
    assert [grad_of(layer) for layer in layers] == [12.0] * 3
    assert min(shapes) >= 1


# A pipeline that took only tensors made a port invent encodings for None, flags and nested values.
# A list of Python numbers is a value, not a batch to deal out.


@pytest.mark.parametrize("stages", STAGES)
def test_none_python_values_and_lists_arrive_unchanged(stages: int) -> None:
    seen: list[dict[str, Any]] = []
    lock = threading.Lock()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            with lock:
                seen.append(kwargs)
            return x * self.weight * float(kwargs["scale"])

    kwargs = {
        "mask": None, "scale": 3, "flag": True, "tag": "a", "opts": {"k": None, "pair": [1, 2]},
    }  # fmt: skip
    x = torch.arange(4.0).view(4, 1)
    model = nn.Sequential(First(), nn.Identity(), nn.Identity(), nn.Identity())
    plan = ModelExecutePlan(stage_ranges(4, stages))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
        output = pipe(x, **kwargs)
    assert torch.equal(output, 3 * x)
    want = {
        "mask": None, "scale": 3, "flag": True, "tag": "a", "opts": {"k": None, "pair": [1, 2]},
    }  # fmt: skip
    assert seen == [want, want]
    assert kwargs == want


# Gathering outputs failed on 0-dim tensors, then gave a vector, and only for one gather axis.


def make_outputs(names: list[int]) -> nn.Sequential:
    class Outputs(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            number = int(x[0, 0])
            return {
                "logits": x, "aux": torch.tensor(float(number)), "n": names[number - 1],
                "name": "a",
            }  # fmt: skip

    return nn.Sequential(Outputs())


X4 = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])


def test_zero_dim_outputs_become_their_mean_and_equal_values_stay() -> None:
    config = RoundPipeRunConfig(num_microbatch=4)
    with RoundPipe(make_outputs([7] * 4), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad():
            merged = pipe(X4)
    assert list(merged) == ["logits", "aux", "n", "name"]
    assert torch.equal(merged["logits"], X4)
    assert merged["aux"].shape == ()
    assert merged["aux"].item() == 2.5
    assert (merged["n"], merged["name"]) == (7, "a")


def test_unequal_values_are_an_error_that_names_the_key_and_both() -> None:
    config = RoundPipeRunConfig(num_microbatch=4)
    with RoundPipe(make_outputs([7, 8, 7, 7]), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad(), pytest.raises(ValueError, match=r"n'?\]?.*7.*8"):
            pipe(X4)


def test_zero_dim_integers_are_averaged_and_not_cut_off() -> None:
    class Count(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[0, 0].long()

    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(nn.Sequential(Count()), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad():
            assert pipe(torch.tensor([[1.0], [2.0]])).item() == 1.5


# A schedule compared the output of one microbatch with the label of another. It was noticed only
# because the shapes differed; with equal shapes it would have trained on wrong pairs.


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatch", range(1, 8))
def test_labels_meet_their_own_outputs(num_microbatch: int, stages: int) -> None:
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.unit

    pairs: list[tuple[float, float]] = []

    def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        pairs.append((output[0].item(), label[0].item()))
        return ((output - label) ** 2).sum()

    x = torch.arange(7.0).view(7, 1)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, execute_plan=fused_plan(4, stages))
    model = nn.Sequential(*(Pass() for _ in range(4)))
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        loss = pipe.forward_backward((x,), label=x.clone(), loss_fn=loss_fn)
    assert loss.item() == 0.0
    firsts = [piece[0].item() for piece in x.tensor_split(num_microbatch)]
    assert sorted(pairs) == [(first, first) for first in firsts]


# Users with microbatches of their own could not hand them over; wrong counts must be named.


def test_pieces_of_ones_own() -> None:
    def split(args: Any, kwargs: Any, _count: int) -> Any:
        return [(args[0][:1],), (args[0][1:],)], [{}, {}]

    layer = Scale(3.0)
    x = torch.arange(4.0).view(4, 1)
    config = RoundPipeRunConfig(num_microbatch=2, split_input=split)
    with RoundPipe(nn.Sequential(layer), devices="cpu:2", model_run_config=config) as pipe:
        _, output = pipe.forward_backward(
            (x,), loss_fn=lambda out, _label: out.sum(), return_outputs=True
        )
        pipe.synchronize()
    assert torch.equal(output, 3 * x)
    assert grad_of(layer) == 6.0


def test_wrong_numbers_of_pieces_are_named() -> None:
    def three(args: Any, _kwargs: Any, _count: int) -> Any:
        return [(args[0],)] * 3, [{}] * 3

    x = torch.ones(6, 1)
    with RoundPipe(nn.Sequential(Scale(1.0)), devices="cpu:2") as pipe:
        with pytest.raises(ValueError, match=r"3.*2|2.*3"):
            pipe(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2, split_input=three))
        with pytest.raises(ValueError, match=r"3.*2|2.*3"):
            pipe.forward_backward(
                (x,), label=x, loss_fn=lambda out, _label: out.sum(),
                run_config=RoundPipeRunConfig(
                    num_microbatch=2, split_label=lambda label, _count: [label] * 3
                ),
            )  # fmt: skip


# A mask made for the whole batch was not cut, so each microbatch used the mask of the first rows. A
# mask of one row goes to all; the rule of a BlockMask gets a batch index, which has to be shifted.


def test_a_mask_of_one_row_goes_to_every_microbatch() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    x = torch.arange(12.0).view(4, 3)
    mask = torch.tensor([[True, False, True]])
    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(nn.Sequential(Masked()), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad():
            output = pipe(x, mask=mask)
    assert output.tolist() == [[0, 0, 2], [3, 0, 5], [6, 0, 8], [9, 0, 11]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_rule_of_a_block_mask_knows_its_own_rows() -> None:
    class Attend(nn.Module):
        def forward(self, v: torch.Tensor, block_mask: Any) -> torch.Tensor:
            q = torch.zeros_like(v)
            out: Any = flex_attention(q, q, v, block_mask=block_mask)
            result: torch.Tensor = out
            return result

    mask = create_block_mask(
        lambda b, _h, q, k: k <= q + b, B=4, H=None, Q_LEN=4, KV_LEN=4, device="cpu", BLOCK_SIZE=2
    )
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(4, 1, 4, 1).contiguous()
    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(nn.Sequential(Attend()), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad():
            output = pipe(v, block_mask=mask)
    assert output.view(4, 4).tolist() == [
        [0.0, 0.5, 1.0, 1.5], [0.5, 1.0, 1.5, 1.5], [1.0, 1.5, 1.5, 1.5], [1.5] * 4,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_block_mask_made_for_every_row_goes_whole_to_every_microbatch(stages: int) -> None:
    seen: list[Any] = []

    class Keep(nn.Module):
        def forward(self, v: torch.Tensor, block_mask: Any) -> Any:
            return v, block_mask

    class Attend(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, Any]) -> torch.Tensor:
            v, block_mask = pair
            seen.append(block_mask)
            q = torch.zeros_like(v)
            out: Any = flex_attention(q, q, v, block_mask=block_mask)
            result: torch.Tensor = out
            return result

    mask = create_block_mask(
        lambda _b, _h, q, k: k <= q, B=None, H=None, Q_LEN=4, KV_LEN=4, device="cpu", BLOCK_SIZE=2
    )
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(4, 1, 4, 1).contiguous()
    plan = ModelExecutePlan(stage_ranges(2, stages))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    model = nn.Sequential(Keep(), Attend())
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
        output = pipe(v, block_mask=mask)
    assert output.view(4, 4).tolist() == [[0.0, 0.5, 1.0, 1.5]] * 4
    assert [m.kv_num_blocks.tolist() for m in seen] == [mask.kv_num_blocks.tolist()] * 2


# Under one form of recompute the tensors in a dataclass came out without a gradient; here the same
# with the output classes of transformers, which are read by attribute, key and index.


@pytest.mark.parametrize("stages", [1, 2])
def test_model_outputs_between_stages_and_merged(stages: int) -> None:
    class First(Scale):
        def forward(self, x: torch.Tensor) -> Any:
            return CausalLMOutput(logits=self.weight * x, hidden_states=(x, x + 1))

    class Second(Scale):
        def forward(self, out: Any) -> Any:
            assert isinstance(out, CausalLMOutput)
            assert out.logits.requires_grad
            assert out["logits"] is out.logits
            assert out.loss is None
            return CausalLMOutput(loss=(self.weight * out.logits).sum(), logits=out.logits)

    first, second = First(2.0), Second(3.0)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=fused_plan(2, stages))
    model = nn.Sequential(first, second)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        loss, output = pipe.forward_backward(
            (torch.tensor([1.0, 2.0]),), loss_fn=lambda out, _label: out.loss, return_outputs=True
        )
        pipe.synchronize()
    assert loss.item() == 18.0
    assert grad_of(first) == 9.0
    assert grad_of(second) == 6.0
    assert isinstance(output, CausalLMOutput)
    for logits in (output.logits, output["logits"], output[1]):
        assert logits.tolist() == [2.0, 4.0]
    assert output.loss.item() == 9.0  # of 6 and 12: 0-dim tensors are averaged
    assert output.hidden_states is None


# A sharded label that was cut like any tensor was silently gathered; and a batch of too few rows
# gave fewer pieces without a word.


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_labels_stay_sharded(mesh: DeviceMesh) -> None:
    label = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    batch = split_batch((torch.ones(4, 1),), {}, label, 2)
    for piece, local in zip(batch.microbatches, ([0.0, 1.0], [2.0, 3.0]), strict=True):
        assert isinstance(piece.label, DTensor)
        assert piece.label.placements == (Shard(0),)
        assert piece.label.device_mesh == mesh
        assert piece.label.to_local().tolist() == local
    with pytest.warns(UserWarning, match=r"the batch has 4 rows.*fewer than num_microbatch=8"):
        batch = split_batch((torch.ones(4, 1),), {}, label, 8)
    assert [piece.label.to_local().tolist() for piece in batch.microbatches] == [
        [0.0], [1.0], [2.0], [3.0],
    ]  # fmt: skip


def test_sharded_labels_reach_the_loss_function(mesh: DeviceMesh) -> None:
    label = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    seen: list[tuple[Any, list[float]]] = []

    def loss_fn(output: torch.Tensor, piece: Any) -> torch.Tensor:
        assert isinstance(piece, DTensor)
        seen.append((piece.placements, piece.to_local().tolist()))
        return (output.flatten() - piece.to_local()).sum()

    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(nn.Sequential(Scale(1.0)), devices="cpu:1", model_run_config=config) as pipe:
        loss = pipe.forward_backward((torch.ones(4, 1),), label=label, loss_fn=loss_fn)
    assert loss.item() == -2.0
    assert seen == [((Shard(0),), [0.0, 1.0]), ((Shard(0),), [2.0, 3.0])]


def test_sharded_inputs_and_outputs_stay_sharded_and_receive_gradients(mesh: DeviceMesh) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(x, DTensor)
            return x * 2

    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    model = nn.Sequential(Double(), Double())
    for merge_output in (None, False):
        config = RoundPipeRunConfig(num_microbatch=2, merge_output=merge_output)
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
            out = pipe(x)
            pieces = [out] if merge_output is None else list(out)
            assert all(piece.placements == (Shard(0),) for piece in pieces)
            local = torch.cat([piece.to_local() for piece in pieces])
            assert local.tolist() == [0.0, 4.0, 8.0, 12.0]
            x.grad = None
            local.sum().backward()
            assert x.grad is not None
            assert isinstance(x.grad, DTensor)
            assert x.grad.to_local().tolist() == [4.0] * 4
