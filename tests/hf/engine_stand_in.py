"""Plays the engine on the pieces of a cut model.

Every piece runs on a shallow copy with weights of its own, from detached inputs, first forward for
all pieces, then recomputed one by one in the backward, as on separate devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from roundpipe.hf import CutModel
from roundpipe.microbatch.tree import flatten, unflatten


@dataclass
class Weights:
    """Copies of all parameters and buffers, by identity of the original."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, *modules: nn.Module) -> Weights:
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return cls({id(t): t.detach().clone() for t in tensors})


@contextmanager
def poisoned(model: nn.Module) -> Iterator[None]:
    """All floating weights of ``model`` are NaN inside the block."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype.is_floating_point]
    saved = [t.detach().clone() for t in tensors]
    try:
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(torch.nan)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


@dataclass
class Replica:
    """A shallow copy of a module tree with leaves of its own as parameters."""

    module: nn.Module
    leaves: dict[int, nn.Parameter]

    @classmethod
    def of(cls, module: nn.Module, weights: Weights) -> Replica:
        memo: dict[int, nn.Module] = {}
        leaves: dict[int, nn.Parameter] = {}
        copy = _shallow(module, memo, leaves, weights)
        for original, replica in [(m, memo[id(m)]) for m in module.modules()]:
            for name, value in vars(original).items():
                if isinstance(value, MethodType) and id(value.__self__) in memo:
                    replica.__dict__[name] = MethodType(value.__func__, memo[id(value.__self__)])
        return cls(copy, leaves)


def _shallow(
    module: nn.Module,
    memo: dict[int, nn.Module],
    leaves: dict[int, nn.Parameter],
    weights: Weights,
) -> nn.Module:
    if id(module) in memo:
        return memo[id(module)]
    copy = module.__class__.__new__(module.__class__)
    memo[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    for parameter in module._parameters.values():
        if parameter is not None and id(parameter) not in leaves:
            value = weights.values[id(parameter)].clone()
            leaves[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    copy.__dict__["_parameters"] = {
        name: None if p is None else leaves[id(p)] for name, p in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if b is None else weights.values[id(b)].clone()
        for name, b in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else _shallow(child, memo, leaves, weights)
        for name, child in module._modules.items()
    }
    return copy


@dataclass
class Saved:
    """What the engine keeps of one piece for the backward."""

    leaves: list[Any]
    structure: Any
    random_state: torch.Tensor


@dataclass
class Result:
    """Output of the model and gradients, by identity of the original's parameters."""

    output: Any
    grads: dict[int, torch.Tensor]

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return self.grads.get(id(parameter))


def run_as_one_graph(cut: CutModel, batch: Mapping[str, Any]) -> Any:
    """The output of the pieces one after the other, with one graph through all of them."""
    value = cut.layers[0](**batch)
    for piece in list(cut.layers)[1:]:
        value = piece(value)
    return value


def run_as_engine(cut: CutModel, batch: Mapping[str, Any], weights: Weights) -> Result:
    """Forward and backward of one microbatch, each piece alone and on its own weights."""
    output, saved = forward_pieces(cut, batch, weights)
    return Result(output, backward_pieces(cut, saved, weights))


def forward_pieces(
    cut: CutModel, batch: Mapping[str, Any], weights: Weights
) -> tuple[Any, list[Saved]]:
    """Forward through all pieces; no graph outlives its piece."""
    saved: list[Saved] = []
    value: Any = ((), dict(batch))
    for piece in cut.layers:
        leaves, structure = flatten(value)
        saved.append(Saved([_leaf(x) for x in leaves], structure, torch.get_rng_state()))
        value = _call(Replica.of(piece, weights).module, saved[-1])
    leaves, structure = flatten(value)
    return unflatten(structure, [_detached(x) for x in leaves]), saved


def backward_pieces(cut: CutModel, saved: list[Saved], weights: Weights) -> dict[int, torch.Tensor]:
    """Recompute and differentiate the pieces, last one first."""
    grads: dict[int, torch.Tensor] = {}
    upstream: list[torch.Tensor | None] | None = None
    random_state = torch.get_rng_state()
    for piece, inputs in zip(reversed(list(cut.layers)), reversed(saved), strict=True):
        torch.set_rng_state(inputs.random_state)
        fresh = Saved([_leaf(x) for x in inputs.leaves], inputs.structure, inputs.random_state)
        replica = Replica.of(piece, weights)
        output = _call(replica.module, fresh)
        if upstream is None:
            output.loss.backward()
        else:
            _backward(flatten(output)[0], upstream)
        upstream = [x.grad if isinstance(x, torch.Tensor) else None for x in fresh.leaves]
        for key, leaf in replica.leaves.items():
            if leaf.grad is not None:
                grads[key] = grads[key] + leaf.grad if key in grads else leaf.grad
    torch.set_rng_state(random_state)
    return grads


def _call(piece: nn.Module, inputs: Saved) -> Any:
    value = unflatten(inputs.structure, inputs.leaves)
    if isinstance(value, tuple) and len(value) == 2 and value[0] == ():
        return piece(**value[1])
    return piece(value)


def _backward(outputs: list[Any], upstream: list[torch.Tensor | None]) -> None:
    pairs = [
        (x, g)
        for x, g in zip(outputs, upstream, strict=True)
        if isinstance(x, torch.Tensor) and g is not None
    ]
    assert all(x.requires_grad for x, _ in pairs), "a gradient came for what needs none"
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def take_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name; afterwards the model has none."""
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def difference(got: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference, relative to the largest number of its tensor; 0 if all bits agree.

    A gradient that is missing on one side counts as zero.
    """
    worst = 0.0
    for name in got.keys() | expected.keys():
        pair = [t.double() for t in (got.get(name), expected.get(name)) if t is not None]
        a, b = pair if len(pair) == 2 else (pair[0], torch.zeros_like(pair[0]))
        if not torch.equal(a, b):
            relative = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
            assert not math.isnan(relative), f"{name} is not a number"
            worst = max(worst, relative)
    return worst


def closeness(got: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """As :func:`difference`, but what is nothing but rounding next to the largest does not count.

    The gradient of a key's bias, for one, is zero, and computed it is some number near it.
    """
    largest = max(float(t.abs().max()) for t in expected.values())
    worst = 0.0
    assert got.keys() == expected.keys()
    for name, b in expected.items():
        off = float((got[name].double() - b.double()).abs().max())
        assert not math.isnan(off), f"{name} is not a number"
        worst = max(worst, off / max(float(b.abs().max()), 1e-2 * largest))
    return worst


def without_dropout(model: nn.Module) -> None:
    """Set every dropout and every random noise of a tiny model to 0."""
    for module in model.modules():
        for name, value in vars(module).items():
            random = "drop" in name or "jitter" in name or isinstance(module, nn.Dropout)
            if random and isinstance(value, float):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)  # some make modules in their first forward
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def fingerprint(model: nn.Module) -> Any:
    """All that a cut must not change in a model, apart from the library's own collecting hooks."""
    tensors = [
        (n, id(t), t._version) for n, t in (*model.named_parameters(), *model.named_buffers())
    ]
    modules = [
        (name, id(module), type(module), sorted(vars(module)), module.training)
        for name, module in model.named_modules()
    ]
    hooks = [
        len(getattr(module, kind))
        for module in model.modules()
        for kind in ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    config: Any = model.config
    return tensors, modules, hooks, config.to_dict()
