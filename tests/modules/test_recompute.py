"""What layers say to their own recompute: save_for_recompute and its kin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import (
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.devices import CpuChecks, DevicePool, open_cpu_pool
from support.cases import Scale, config_of, grad_of, split_plan, sum_loss

GRAINS = ["stage", "layer"]


@pytest.fixture(params=["plain", "checked"])
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    """Devices that share the host's memory, and devices that do not."""
    if request.param == "plain":
        with open_cpu_pool(2) as plain:
            yield plain
    else:
        with open_cpu_pool(2, CpuChecks()) as checked:
            yield checked
            assert checked.reports() == []


def config(layers: int, stages: int, count: int, grain: str) -> RoundPipeRunConfig:
    return dataclasses.replace(config_of(layers, stages, count), recompute_grain=grain)


class Mixture(nn.Module):
    """Experts chosen by a router that a rounding error can tip: here it never repeats itself."""

    def __init__(self, replays: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.replays = replays
        self.turn = itertools.count()  # shared by all replicas
        self.choices: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replays and doing_recompute():
            (experts,) = get_recompute_data()
        else:
            experts = (torch.arange(len(x)) + next(self.turn)) % 4
            save_for_recompute(experts)
        self.choices.append(experts.tolist())
        rows = [self.experts[int(e)](row) for row, e in zip(x, experts, strict=True)]
        return torch.stack(rows)


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("stages", [2, 3])
def test_the_routing_of_a_mixture_of_experts_is_replayed(
    pool: DevicePool, stages: int, grain: str
) -> None:
    torch.manual_seed(0)
    mixture = Mixture(replays=True)
    model = nn.Sequential(nn.Linear(3, 3), mixture, nn.Linear(3, 3))
    x = torch.randn(6, 3)
    for piece in x.tensor_split(2):
        model(piece).sum().backward()
    want = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    first, mixture.turn = mixture.choices[:], itertools.count()
    model.zero_grad()
    mixture.choices.clear()
    options = config(3, stages, 2, grain)
    with RoundPipe(model, devices=pool, model_run_config=options) as pipe:
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
    # A layer outside the fused stage has run twice; the second time with the first one's choices.
    assert sorted(mixture.choices) == sorted(first * (1 if stages == 1 else 2))
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None and parameter.grad is not None:
            assert torch.equal(parameter.grad, gradient)


def test_without_the_replay_the_gradient_is_that_of_other_experts() -> None:
    mixture = Mixture(replays=False)
    model = nn.Sequential(mixture, nn.Linear(3, 3))
    with RoundPipe(model, devices="cpu:1", model_run_config=config_of(2, 2, 1)) as pipe:
        pipe.forward_backward((torch.ones(1, 3),), loss_fn=sum_loss)
        pipe.synchronize()
    assert mixture.choices == [[0], [1]]
    assert mixture.experts[0].weight.grad is None


@pytest.mark.parametrize("grain", GRAINS)
def test_a_shape_that_the_data_decide_is_the_same_in_the_recompute(grain: str) -> None:
    counts = itertools.count(1)

    class Select(Scale):
        """Keeps so many rows as something outside says."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                (kept,) = get_recompute_data()
            else:
                kept = next(counts)
                save_for_recompute(kept)
            return super().forward(x[:kept])

    layer = Select(2.0)
    model = nn.Sequential(layer, nn.Identity())
    options = config(2, 2, 2, grain)
    with RoundPipe(model, devices="cpu:2", model_run_config=options) as pipe:
        loss = pipe.forward_backward((torch.ones(8, 1),), loss_fn=sum_loss)
        pipe.synchronize()
    assert loss.item() == 2.0 * (1 + 2)
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 3.0


@pytest.mark.parametrize("grain", GRAINS)
def test_structures_come_back_as_they_were_when_saved(pool: DevicePool, grain: str) -> None:
    found: list[tuple[Any, ...]] = []

    class Keeper(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                found.append(get_recompute_data())
                assert get_recompute_data() is found[-1]
            else:
                changing = torch.zeros(2)
                save_for_recompute(
                    {"h": (x * self.weight, torch.tensor([True, False]))}, "word", None, [changing],
                )  # fmt: skip
                changing.fill_(7.0)
            return super().forward(x)

    model = nn.Sequential(Keeper(3.0), nn.Identity())
    with RoundPipe(model, devices=pool, model_run_config=config(2, 2, 2, grain)) as pipe:
        pipe.forward_backward((torch.tensor([[1.0], [2.0]]),), loss_fn=sum_loss)
    assert len(found) == 2
    for row, (tree, word, nothing, changing) in enumerate(found):
        assert (word, nothing) == ("word", None)
        h, mask = tree["h"]
        assert h.tolist() == [[3.0 * (row + 1)]]
        assert not h.requires_grad
        assert mask.tolist() == [True, False]
        assert changing[0].tolist() == [0.0, 0.0]


def test_nothing_is_kept_where_no_recompute_follows() -> None:
    passes: list[bool] = []

    class Keeper(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passes.append(doing_recompute())
            save_for_recompute(x)
            return super().forward(x)

    layer = Keeper(1.0)
    x = torch.ones(2, 1)
    layer(x).sum().backward()  # a plain loop
    with RoundPipe(nn.Sequential(layer, nn.Identity()), devices="cpu:2") as pipe:
        with torch.no_grad():
            options = RoundPipeRunConfig(num_microbatch=2, execute_plan=split_plan(2, 2))
            pipe(x, roundpipe_run_config=options)
        pipe.forward_backward((x,), loss_fn=sum_loss, run_config=config_of(2, 1, 2))
    assert passes == [False] * 5


def test_backward_twice_finds_the_data_twice() -> None:
    class Keeper(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                (factor,) = get_recompute_data()
            else:
                factor = torch.tensor(5.0)
                save_for_recompute(factor)
            return super().forward(x * factor)

    layer = Keeper(1.0)
    with RoundPipe(nn.Sequential(layer, nn.Identity()), devices="cpu:2") as pipe:
        options = RoundPipeRunConfig(num_microbatch=2, execute_plan=split_plan(2, 2))
        loss = pipe(torch.ones(2, 1), roundpipe_run_config=options).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        pipe.synchronize()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 20.0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_checkpoint_inside_the_layer_sees_the_same_pass(stages: int) -> None:
    class Nested(Scale):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                (factor,) = get_recompute_data()
            else:
                factor = torch.tensor(4.0)
                save_for_recompute(factor)
            product: torch.Tensor = x * factor * self.weight
            return product.sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

    layer = Nested(1.0)
    x = torch.ones(2, 1, requires_grad=True)
    layer(x).sum().backward()
    want = grad_of(layer)
    layer.weight.grad = None
    model = nn.Sequential(layer, nn.Identity())
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(2, stages, 1)) as pipe:
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.synchronize()
    assert grad_of(layer) == want


class Saying(Scale):
    """Says one of the wrong things."""

    def __init__(self, how: str) -> None:
        super().__init__(1.0)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "twice":
            save_for_recompute(1)
            save_for_recompute(2)
        elif self.how == "at once" or (self.how == "unsaved" and doing_recompute()):
            get_recompute_data()
        return super().forward(x)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "save_for_recompute was called twice in one call of a layer"),
        ("at once", "get_recompute_data was called in a layer's first forward"),
        ("unsaved", "this layer's forward did not call save_for_recompute"),
    ],
)
def test_misuse_is_told(how: str, message: str) -> None:
    model = nn.Sequential(Saying(how), nn.Identity())
    with RoundPipe(model, devices="cpu:1", model_run_config=config_of(2, 2, 1)) as pipe:
        with pytest.raises(RuntimeError, match=message):
            pipe.forward_backward((torch.ones(2, 1),), loss_fn=sum_loss)


def test_asking_outside_a_layer() -> None:
    assert not doing_recompute()
    save_for_recompute(1)
    with pytest.raises(RuntimeError, match="called outside a layer that roundpipe runs"):
        get_recompute_data()
