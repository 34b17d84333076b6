"""The plain PyTorch loop over microbatches, layer by layer, with everything that it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.microbatch import Batch, split_batch
from roundpipe.microbatch.tree import flatten, unflatten
from roundpipe.random_state import draw_call_seed, layer_seed

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Task:
    """What the user gave.

    Attributes:
        args: arguments of the first layer.
        kwargs: likewise, by keyword.
        label: for the loss function.
        loss_fn: the loss function.
        loss_reduction: as in the run config.
        seed: of torch's generator at the beginning of each run.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    loss_fn: LossFunction
    loss_reduction: str
    seed: int

    def split(self, count: int) -> Batch:
        """The batch as roundpipe cuts it, each piece with tensors of its own."""
        args, kwargs, label = copied((self.args, self.kwargs, self.label))
        return split_batch(args, kwargs, label, count, None, None, warned=set())


@dataclass
class Seen:
    """What one run showed.

    Attributes:
        outputs: for each layer the outputs of its forwards, by microbatch; further entries are
            recomputes.
        loss: the sum of the losses.
        gradients: by name of the parameter.
        buffers: by name.
    """

    outputs: list[list[Any]]
    loss: Any = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def copied(tree: Any, leaves_of_graph: bool = True) -> Any:
    """The same tree with tensors of its own, which keep ``requires_grad``.

    Args:
        tree: any structure.
        leaves_of_graph: False for what a layer gets from the one before it: it may overwrite that
            in place, which autograd forbids on leaves.
    """

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copy = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copy if leaves_of_graph or not copy.requires_grad else copy.clone()

    leaves, structure = flatten(tree)
    return unflatten(structure, [copy_of(leaf) for leaf in leaves])


def detached(tree: Any) -> Any:
    """The tree as it is now, without gradients."""
    leaves, structure = flatten(tree)
    return unflatten(
        structure,
        [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, as roundpipe sees them."""
    return list(model) if isinstance(model, nn.Sequential) else [model]


def label_of(model: nn.Module, index: int) -> str:
    """A layer in words."""
    layers = layers_of(model)
    return f"layer {index} ({type(layers[index]).__name__})"


def call_layer(layer: nn.Module, index: int, state: Any) -> Any:
    """Run a layer on what the one before it returned, or on the model's arguments."""
    if index == 0:
        args, kwargs = state
        return layer(*args, **kwargs)
    return layer(state)


def losses_of(result: Any) -> list[Any]:
    """What a loss function returned, as a list."""
    return list(result) if isinstance(result, list | tuple) else [result]


def results_of(seen: Seen, model: nn.Module) -> None:
    """Note a model's gradients and buffers."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        seen.gradients[name] = None if grad is None else grad.detach().clone()
    for name, buffer in model.named_buffers():
        seen.buffers[name] = buffer.detach().clone()


def run_plain(model: nn.Module, task: Task, count: int) -> Seen:
    """Forward, loss and backward of each microbatch after the other.

    Random numbers are those that roundpipe's CPU devices draw for the same call.
    """
    torch.manual_seed(task.seed)
    layers = layers_of(model)
    seen = Seen([[] for _ in layers])
    batch = task.split(count)
    call_seed = draw_call_seed()
    totals: list[Any] = []
    for piece in batch.microbatches:
        state: Any = (piece.args, piece.kwargs)
        for index, layer in enumerate(layers):
            torch.manual_seed(layer_seed(call_seed, piece.index, index))
            state = call_layer(layer, index, state)
            seen.outputs[index].append(detached(state))
        torch.manual_seed(layer_seed(call_seed, piece.index, len(layers)))
        losses = losses_of(task.loss_fn(state, piece.label))
        if task.loss_reduction == "mean" and piece.rows and batch.rows:
            losses = [loss * (piece.rows / batch.rows) for loss in losses]
        torch.autograd.backward([loss for loss in losses if loss.requires_grad])
        now = [loss.detach() for loss in losses]
        totals = [a + b for a, b in zip(totals, now, strict=True)] if totals else now
    seen.loss = totals
    results_of(seen, model)
    return seen


@contextlib.contextmanager
def untouched_generators() -> Iterator[None]:
    """Every generator is afterwards as it was before."""
    import random
    import sys

    python, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)


@contextlib.contextmanager
def intraop_threads(count: int) -> Iterator[None]:
    """A plain loop sums in the order of so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
