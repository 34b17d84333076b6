"""Replicas: a layer's module tree with other tensors in it, the original untouched."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from roundpipe.replicas import replicate


def replica_of(module: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A replica whose tensors are twice the originals', and what was put in place of what."""
    parameters = {
        id(p): nn.Parameter(p.detach() * 2, requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    buffers = {id(b): b * 2 for b in module.buffers()}
    return replicate(module, parameters, buffers), {**parameters, **buffers}


def test_a_replica_computes_with_its_own_tensors() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(layer.state_dict())
    replica, placed = replica_of(layer)
    assert isinstance(replica, nn.Sequential)
    for p, q in zip(layer.parameters(), replica.parameters(), strict=True):
        assert q is placed[id(p)]
    assert torch.equal(replica[0](torch.ones(1, 2)), layer[0](torch.ones(1, 2)) * 2)
    replica(torch.randn(4, 2))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_is_shared_within_a_layer_stays_shared() -> None:
    inner = nn.Linear(2, 2)
    layer = nn.ModuleList([inner, inner, nn.Linear(2, 2)])
    layer[2].weight = inner.weight
    replica, _ = replica_of(layer)
    assert isinstance(replica, nn.ModuleList)
    assert replica[0] is replica[1]
    assert replica[0] is not inner
    assert replica[2].weight is replica[0].weight


def test_empty_places_stay_empty_and_unnamed_buffers_are_shared() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.register_buffer("absent", None)
    layer.register_buffer("shared", torch.ones(1))
    layer.register_module("nobody", None)
    replica = replicate(layer, {id(layer.weight): nn.Parameter(torch.ones(2, 2))}, {})
    assert replica.bias is None
    assert replica.absent is None
    assert replica.nobody is None
    assert replica.shared is layer.shared


def test_flat_weights_of_a_recurrent_layer_follow() -> None:
    layer = nn.LSTM(2, 2)
    replica, placed = replica_of(layer)
    assert isinstance(replica, nn.LSTM)
    assert [id(w) for w in replica._flat_weights if w is not None] == [
        id(placed[id(w)]) for w in layer._flat_weights if w is not None
    ]
    replica(torch.ones(1, 1, 2))


def test_attributes_that_point_at_originals_follow_and_others_are_the_same_objects() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.by_name = {"main": self.linear}
            self.several = (self.linear, 3)
            self.plain = [1, 2]
            self.config = object()
            self.call = self.linear.forward  # as libraries do that patch a forward
            object.__setattr__(self, "hidden", self.linear)

    layer = Layer()
    replica, _ = replica_of(layer)
    assert isinstance(replica, Layer)
    assert replica.linear is not layer.linear
    assert replica.by_name["main"] is replica.linear
    assert replica.several == (replica.linear, 3)
    assert getattr(replica, "hidden") is replica.linear  # noqa: B009
    assert getattr(replica.call, "__self__") is replica.linear  # noqa: B009
    assert replica.plain is layer.plain
    assert replica.config is layer.config
    assert layer.by_name["main"] is layer.linear


def test_hooks_run_and_what_a_forward_rebinds_is_lost_with_the_replica() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x

    layer, hooked = Counting(), list[int]()
    layer.register_forward_hook(lambda *_: hooked.append(1))
    replica, _ = replica_of(layer)
    replica(torch.ones(1))
    assert isinstance(replica, Counting)
    assert (hooked, replica.calls, layer.calls) == ([1], 1, 0)
