"""Parameters of every kind, lazy modules, frozen stages, compiled layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CpuChecks, open_cpu_pool
from support.cases import config_of, sum_loss

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def square_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


def test_lazy_modules_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match=r"'0.weight' has no shape yet \(a lazy module\); run a"):
        RoundPipe(model, devices="cpu:1")
    model(X)
    with RoundPipe(model, devices="cpu:1") as pipe:
        pipe.forward_backward((X,), loss_fn=sum_loss)


@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm,
             parametrizations.orthogonal],
)  # fmt: skip
def test_parametrized_weights(norm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum, num_microbatches=(2,))
    assert report.ok, str(report)


class Int8(torch.Tensor):
    """A weight of one byte an element and a scale for each row, as quantisers make them."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scales: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, _meta: None, _size: Any, _stride: Any) -> Int8:
        return cls(parts["codes"], parts["scales"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scales)
        if func is torch.ops.aten.clone.default:
            return cls(args[0].codes.clone(), args[0].scales.clone())
        raise NotImplementedError(f"{func} would unpack the weight")


class QuantisedLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, trainable: bool = False) -> None:
        super().__init__()
        scales = weight.abs().amax(1) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(Int8(codes, scales), requires_grad=trainable)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        unpacked = weight.codes.to(x.dtype) * weight.scales[:, None]
        return torch.nn.functional.linear(x, unpacked, self.bias)


@pytest.mark.parametrize("kind", ["plain", "checked"])
def test_weights_of_a_tensor_subclass_are_streamed_without_being_unpacked(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), QuantisedLinear(torch.randn(4, 4)), nn.Linear(4, 4))
    for piece in X.tensor_split(2):
        model(piece).sum().backward()
    trained: list[Any] = [model[0].weight, model[1].bias, model[2].weight]
    want = [p.grad for p in trained]
    model.zero_grad()
    pool = open_cpu_pool(2) if kind == "plain" else open_cpu_pool(2, CpuChecks())
    with pool, RoundPipe(model, devices=pool, model_run_config=config_of(3, 3, 2)) as pipe:
        pipe.forward_backward((X,), loss_fn=sum_loss)
        pipe.synchronize()
    for parameter, gradient in zip(trained, want, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_weights_that_cannot_be_trained_or_moved_are_refused() -> None:
    model = nn.Sequential(QuantisedLinear(torch.randn(4, 4), trainable=True))
    with pytest.raises(TypeError, match=r"'0.weight' is a Int8 that requires grad; weights of a"):
        RoundPipe(model, devices="cpu:1")

    class Opaque(nn.Parameter):
        pass

    layer = nn.Linear(4, 4)
    layer.weight = Opaque(torch.ones(4, 4))
    with pytest.raises(TypeError, match="'weight' is a Opaque, which does not tell what it is"):
        RoundPipe(layer, devices="cpu:1")


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_frozen_stages_in_front_are_not_recomputed(grain: str) -> None:
    calls = [0, 0, 0]

    class Counts(nn.Linear):
        def __init__(self, index: int) -> None:
            super().__init__(4, 4)
            self.index = index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[self.index] += 1
            return super().forward(x)

    model = nn.Sequential(*(Counts(i) for i in range(3)))
    model[0].requires_grad_(False)
    config = RoundPipeRunConfig(
        num_microbatch=2, recompute_grain=grain, execute_plan=config_of(3, 3, 2).execute_plan
    )
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        pipe.forward_backward((X,), loss_fn=sum_loss)
        pipe.synchronize()
    assert calls == [2, 4, 2]
    assert model[0].weight.grad is None


class Squash(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_compiled_by_their_method_are_compiled_on_devices_too() -> None:
    graphs: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch.manual_seed(0)
    model = nn.Sequential(Squash(4, 4), Squash(4, 4))
    plain = copy.deepcopy(model)
    for piece in X[:5].tensor_split(2):
        plain(piece).sum().backward()
    for layer in model:
        layer.compile(backend=backend)
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(2, 2, 2)) as pipe:
        pipe.forward_backward((X[:5],), loss_fn=sum_loss)
        pipe.synchronize()
    torch._dynamo.reset()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert 1 <= len(graphs) <= 2 * 2


def test_an_exponential_average_follows_the_published_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average: Any = AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    with RoundPipe(model, devices="cpu:2") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        values = [model[0].weight.detach().clone()]
        average.update_parameters(model)
        pipe.forward_backward((X,), loss_fn=lambda out, _: (out * X[: len(out)]).sum())
        pipe.step(optimizer.step)
        pipe.synchronize()
        values.append(model[0].weight.detach().clone())
        average.update_parameters(model)
    assert not torch.equal(values[0], values[1])
    (averaged,) = (p for name, p in average.named_parameters() if name.endswith("0.weight"))
    torch.testing.assert_close(averaged.detach(), (values[0] + values[1]) / 2)
