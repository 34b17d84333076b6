"""Cases about recompute and autograd that went wrong in public, each told above its test."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from support.cases import STAGES, Scale, config_of, grad_of, split_plan, sum_loss

# Under one form of recompute the tensors inside a dataclass were not seen by autograd. Elsewhere a
# block overwrote an entry of the dict it was given: run again, it found its own output there.


@dataclasses.dataclass
class Pair:
    h: torch.Tensor
    k: int


@pytest.mark.parametrize("stages", [1, 2])
def test_a_dataclass_between_stages(stages: int) -> None:
    seen: list[tuple[bool, int]] = []

    class Make(Scale):
        def forward(self, x: torch.Tensor) -> Any:
            return Pair(super().forward(x), 7)

    class Use(Scale):
        def forward(self, pair: Any) -> torch.Tensor:
            seen.append((pair.h.requires_grad, pair.k))
            return super().forward(pair.h).sum()

    make, use = Make(2.0), Use(3.0)
    x = torch.tensor([1.0, 2.0])
    config = config_of(2, stages, 1)
    with RoundPipe(nn.Sequential(make, use), devices="cpu:2", model_run_config=config) as pipe:
        loss = pipe.forward_backward((x,))
        pipe.synchronize()
    assert (loss.item(), grad_of(make), grad_of(use)) == (18.0, 9.0, 6.0)
    assert set(seen) == {(True, 7)}


class Overwrite(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, d: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        d["feat"] = self.linear(d["feat"])
        return d


@pytest.mark.parametrize("stages", [1, 2])
def test_a_dict_that_is_overwritten_and_handed_on(stages: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Overwrite(2, 3), Overwrite(3, 4))
    feature = torch.randn(4, 2)
    for piece in feature.tensor_split(2):
        model({"feat": piece})["feat"].sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    mine = {"feat": feature}
    config = config_of(2, stages, 2)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.forward_backward((mine,), loss_fn=lambda out, _label: out["feat"].sum())
        pipe.synchronize()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)
    assert mine["feat"] is feature


# Recompute runs a layer twice, so running statistics moved twice a step; one library then did not
# move them at all when no gradient was taken.


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    ("x", "num_microbatch", "mean", "variance"),
    [([1.0, 3.0], 1, 0.2, 1.1), ([1.0, 3.0, 5.0, 7.0], 2, 0.78, 1.19)],
)
def test_statistics_move_once(
    x: list[float], num_microbatch: int, mean: float, variance: float, stages: int, grain: str
) -> None:
    rows = torch.tensor(x).view(-1, 1)
    for kind in ("fused", "forward and backward", "no grad", "eval"):
        norm = nn.BatchNorm1d(1)
        model = nn.Sequential(norm, nn.Identity(), nn.Identity(), nn.Identity())
        config = dataclasses.replace(config_of(4, stages, num_microbatch), recompute_grain=grain)
        split = dataclasses.replace(config, execute_plan=split_plan(4, stages))
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
            if kind == "fused":
                pipe.forward_backward((rows,), loss_fn=sum_loss)
            elif kind == "forward and backward":
                pipe(rows, roundpipe_run_config=split).sum().backward()
            else:
                pipe.train(kind == "no grad")
                with torch.no_grad():
                    pipe(rows, roundpipe_run_config=split)
            pipe.synchronize()
        want = (0.0, 1.0, 0) if kind == "eval" else (mean, variance, num_microbatch)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        assert norm.running_mean.item() == pytest.approx(want[0])
        assert norm.running_var.item() == pytest.approx(want[1])
        assert norm.num_batches_tracked.item() == want[2]


# Recompute without the saved random state draws another mask, so the gradient belongs to another
# sample; and the same seed gave other numbers for another number of parts.


class Drop(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5)


def run_dropout(stages: int, num_microbatch: int, x: torch.Tensor) -> tuple[float, float, Any]:
    torch.manual_seed(3)
    layer = Drop(1.0)
    model = nn.Sequential(layer, nn.Identity(), nn.Identity(), nn.Identity())
    config = config_of(4, stages, num_microbatch)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        loss, output = pipe.forward_backward((x,), loss_fn=sum_loss, return_outputs=True)
        pipe.synchronize()
    return loss.item(), grad_of(layer), output


@pytest.mark.parametrize("num_microbatch", [1, 2, 5])
def test_dropout_draws_the_same_mask_again_whatever_the_stages(num_microbatch: int) -> None:
    x = torch.ones(1000)
    results = [run_dropout(stages, num_microbatch, x)[:2] for stages in (1, 2, 4, 4)]
    for loss, gradient in results:
        assert 800 < loss < 1200
        assert gradient == loss
    assert len(set(results)) == 1


def test_microbatches_have_masks_of_their_own() -> None:
    _, _, output = run_dropout(2, 2, torch.ones(2, 64))
    assert not torch.equal(output[0], output[1])


def test_recompute_does_not_advance_the_callers_generator() -> None:
    def next_number(fused: bool) -> float:
        torch.manual_seed(3)
        model = nn.Sequential(Drop(1.0), nn.Identity())
        with RoundPipe(model, devices="cpu:2") as pipe:
            torch.manual_seed(4)
            if fused:
                pipe.forward_backward((torch.ones(6),), loss_fn=sum_loss)
            else:
                pipe(torch.ones(6))
            return torch.rand(1).item()

    assert next_number(True) == next_number(False)


# Autocast is state of a thread: workers used the default low precision type, or none.


@pytest.mark.parametrize("stages", STAGES)
def test_autocast_and_grad_mode_reach_every_pass(stages: int) -> None:
    records: list[tuple[bool, torch.dtype, torch.dtype, bool]] = []
    lock = threading.Lock()

    class Recorder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x.float())
            with lock:
                records.append(
                    (
                        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
                        out.dtype, torch.is_grad_enabled(),
                    )
                )  # fmt: skip
            return out

    model = nn.Sequential(*(Recorder(2, 2) for _ in range(4)))
    x = torch.ones(4, 2)
    config = config_of(4, stages, 2)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            pipe.forward_backward((x,), loss_fn=sum_loss)
        fused = 4 // stages
        assert len(records) == 2 * (4 + 4 - fused)  # forward, and recompute but for the fused
        assert set(records) == {(True, torch.bfloat16, torch.bfloat16, True)}
        records.clear()
        pipe.forward_backward((x,), loss_fn=sum_loss)
        assert {(r[0], r[2], r[3]) for r in records} == {(False, torch.float32, True)}
        records.clear()
        with torch.no_grad():
            pipe(x, roundpipe_run_config=RoundPipeRunConfig(execute_plan=split_plan(4, stages)))
        assert {(r[0], r[2], r[3]) for r in records} == {(False, torch.float32, False)}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


# In-place operations cut the graph at the end of a recomputed block, or were left out of the
# recompute: the right loss and a wrong gradient.


class ViewRelu(Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.weight)[:].relu_()


class CloneAdd(Scale):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        y = self.weight.clone()
        y.add_(1)
        return y * y


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("layer", "x", "loss", "gradient"),
    [(ViewRelu(1.0), torch.zeros(5), 5.0, 5.0), (CloneAdd(2.0), torch.zeros(1), 9.0, 6.0)],
)
def test_in_place_operations_inside_a_layer(
    layer: Scale, x: torch.Tensor, loss: float, gradient: float, stages: int
) -> None:
    layer.weight.grad = None
    model = nn.Sequential(layer, nn.Identity())
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(2, stages, 1)) as pipe:
        assert pipe.forward_backward((x,), loss_fn=sum_loss).item() == loss
        pipe.synchronize()
    assert grad_of(layer) == gradient


@pytest.mark.parametrize("stages", STAGES)
def test_an_input_that_is_overwritten_is_the_layers_own_copy(stages: int) -> None:
    class DoubleAndScale(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    layer = DoubleAndScale(1.0)
    model = nn.Sequential(layer, *(nn.Identity() for _ in range(3)))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(4, stages, 2)) as pipe:
        assert pipe.forward_backward((x,), loss_fn=sum_loss).item() == 20.0
        pipe.synchronize()
    assert grad_of(layer) == 20.0
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


# With a frozen embedding in front, no input of a recomputed block needs a gradient, and one form of
# checkpointing returned None for everything behind it. Users of adapters met it all the time.


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_a_frozen_first_stage(num_microbatch: int) -> None:
    embedding = nn.Embedding.from_pretrained(
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), freeze=True
    )
    linear = nn.Linear(2, 1)
    model = nn.Sequential(embedding, linear)
    config = config_of(2, 2, num_microbatch)
    with (
        warnings.catch_warnings(),
        RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe,
    ):
        warnings.simplefilter("error")
        pipe.forward_backward((torch.tensor([0, 1, 2]),), loss_fn=sum_loss)
        pipe.synchronize()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[2.0, 2.0]]
    assert embedding.weight.grad is None


@pytest.mark.parametrize("stages", [1, 3])
def test_a_frozen_stage_in_the_middle(stages: int) -> None:
    layers = [Scale(2.0), Scale(3.0), Scale(5.0)]
    layers[1].requires_grad_(False)
    x = torch.tensor([1.0, 2.0])
    config = config_of(3, stages, 2)
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2", model_run_config=config) as pipe:
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
    assert (grad_of(layers[0]), grad_of(layers[2])) == (45.0, 18.0)
    assert layers[1].weight.grad is None


def test_all_stages_frozen_is_an_error() -> None:
    model = nn.Sequential(Scale(), Scale()).requires_grad_(False)
    with RoundPipe(model, devices="cpu:2", name="net") as pipe:
        with pytest.raises(RuntimeError, match="nothing in net requires grad: all parameters are"):
            pipe.forward_backward((torch.ones(4),), loss_fn=sum_loss)


# Outputs that carry masks, ids or empty tensors were passed to backward as if they had a graph.


@pytest.mark.parametrize("stages", [1, 3])
def test_bool_int_and_empty_tensors_between_stages(stages: int) -> None:
    seen: list[tuple[Any, ...]] = []

    class Layer(Scale):
        def forward(self, *state: Any) -> Any:
            h, mask, ids, empty = state if len(state) == 4 else state[0]
            others = (mask, ids, empty)
            seen.append(
                (
                    *(t.dtype for t in others), *(tuple(t.tolist()) for t in others),
                    *(t.requires_grad for t in others),
                )
            )  # fmt: skip
            return super().forward(h), mask, ids, empty

    layers = [Layer(2.0) for _ in range(3)]
    args = (
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]),
        torch.tensor([4, 5, 6]), torch.zeros(0),
    )  # fmt: skip

    def split(args: Any, kwargs: Any, _count: int) -> Any:
        return [args], [kwargs]

    config = RoundPipeRunConfig(
        num_microbatch=1, split_input=split, execute_plan=config_of(3, stages, 1).execute_plan
    )
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2", model_run_config=config) as pipe:
        loss = pipe.forward_backward(args, loss_fn=lambda out, _label: (out[0] * out[1]).sum())
        pipe.synchronize()
    assert loss.item() == 32.0
    assert [grad_of(layer) for layer in layers] == [16.0] * 3
    assert set(seen) == {
        (
            torch.bool, torch.int64, torch.float32, (True, False, True), (4, 5, 6), (),
            False, False, False,
        )
    }  # fmt: skip


# Layers that differentiate in their forward (gradient penalties) failed under checkpointing.


@pytest.mark.parametrize("stages", [1, 2])
def test_a_layer_that_differentiates_inside(stages: int) -> None:
    class Penalty(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad((self.weight * x * x).sum(), x, create_graph=True)
            return g**2

    layer = Penalty(1.0)
    model = nn.Sequential(layer, nn.Identity())
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(2, stages, 1)) as pipe:
        assert pipe.forward_backward((torch.tensor([3.0]),), loss_fn=sum_loss).item() == 36.0
        pipe.synchronize()
    assert grad_of(layer) == 72.0


# Each size of a microbatch was compiled again, and recompute picked another compiled version.


# The compiler looks at .grad of the layer's input, in a plain loop as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_compile_once_for_each_size() -> None:
    graphs: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.randn(5, 2)
    for _ in range(3):
        for piece in x.tensor_split(2):
            model(piece).sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    layers: list[Any] = [torch.compile(layer, backend=backend) for layer in model]
    compiled = nn.Sequential(*layers)
    with RoundPipe(compiled, devices="cpu:2", model_run_config=config_of(2, 2, 2)) as pipe:
        for _ in range(3):
            pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
    torch._dynamo.reset()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)
    assert 2 <= len(graphs) <= 2 * 2
