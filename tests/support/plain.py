"""The plain PyTorch loop that roundpipe is held against, with the same staleness."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """One microbatch as the plain loop sees it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any

    def to(self, device: torch.device | None) -> Piece:
        if device is None:
            return self
        there = _moved((self.args, self.kwargs, self.label), lambda t: t.to(device))
        return Piece(*there)


@dataclass(frozen=True)
class Batch:
    """A batch, and how the plain loop cuts it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any

    def pieces(self, count: int) -> list[Piece]:
        return [
            Piece(
                _cut(self.args, m, count), _cut(self.kwargs, m, count), _cut(self.label, m, count)
            )
            for m in range(count)
        ]


def _cut(tree: Any, index: int, count: int) -> Any:
    return _moved(tree, lambda t: t.tensor_split(count)[index] if t.dim() and t.shape[0] > 1 else t)


def _moved(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, function, tree)


@dataclass(frozen=True)
class Subject:
    """A model with data and loss: what a row of the matrix is about."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[int], Batch]
    loss: LossFunction
    tolerance: float = 0.0


@dataclass
class Record:
    """Everything a training run shows to its user."""

    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, weight_decay=0.1)


@contextlib.contextmanager
def intraop_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clones(named: Any) -> dict[str, torch.Tensor | None]:
    return {name: _of_host(p.grad) for name, p in named}


def _of_host(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().to("cpu", copy=True)


def watched_input(batch: Batch) -> torch.Tensor | None:
    """The first floating-point argument, which the matrix makes require grad."""
    tensors = [t for t in batch.args if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return tensors[0].requires_grad_() if tensors else None


def train_plain(
    subject: Subject,
    num_microbatch: int,
    is_async: bool,
    steps: int,
    threads: int = 1,
    device: torch.device | None = None,
) -> Record:
    """Gradient accumulation over microbatches; calls compute with θ_max(t-1,0) or θ_t.

    On an accelerator the model and the microbatches are there, the optimizer on the host; what the
    loop shows is on the host.
    """
    record = Record()
    with intraop_threads(threads):
        model = subject.build()
        masters = copy.deepcopy(model)
        model.to(device)
        optimizer = make_optimizer(p for p in masters.parameters() if p.requires_grad)
        versions = [_values(masters)]
        for t in range(steps):
            _load(model, versions[max(t - 1, 0) if is_async else t])
            batch = subject.batch(t)
            watched = watched_input(batch)
            pieces = [piece.to(device) for piece in batch.pieces(num_microbatch)]
            outputs, losses = zip(
                *(_microbatch(model, p, subject.loss) for p in pieces), strict=True
            )
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss
            record.losses.append(total)
            record.outputs.append(outputs)
            record.gradients.append(clones(model.named_parameters()))
            record.input_gradients.append(None if watched is None else watched.grad)
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.to("cpu")
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            versions.append(_values(masters))
        _load(model, versions[-1])
        record.state = {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}
    return record


def _microbatch(model: nn.Sequential, piece: Piece, loss_fn: LossFunction) -> tuple[Any, Any]:
    first, *rest = list(model)
    output = first(*piece.args, **piece.kwargs)
    for layer in rest:
        output = layer(output)
    loss = loss_fn(output, piece.label)
    loss.backward()
    return _moved(output, lambda t: t.detach().to("cpu", copy=True)), loss.detach().to("cpu")


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _load(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def train_roundpipe(
    subject: Subject,
    devices: Any,
    config: RoundPipeRunConfig,
    is_async: bool,
    steps: int,
) -> Record:
    """The same run through roundpipe."""
    record = Record()
    model = subject.build()
    with RoundPipe(model, model_run_config=config, devices=devices, name="subject") as pipe:
        with OptimizerCtx():
            optimizer = make_optimizer(pipe.parameters())

        def step() -> None:
            record.gradients.append(clones(pipe.named_parameters()))
            optimizer.step()
            optimizer.zero_grad()

        for t in range(steps):
            batch = subject.batch(t)
            watched = watched_input(batch)
            loss, output = pipe.forward_backward(
                batch.args, batch.kwargs, batch.label, subject.loss, return_outputs=True,
                run_config=RoundPipeRunConfig(merge_output=list),
            )  # fmt: skip
            record.losses.append(loss)
            record.outputs.append(output)
            record.input_gradients.append(None if watched is None else watched.grad)
            pipe.step(step, is_async=is_async)
        pipe.synchronize()
        record.state = {k: v.clone() for k, v in pipe.state_dict().items()}
    return record


def assert_same(got: Record, want: Record, tolerance: float = 0.0) -> None:
    """Bitwise equality, or to ``tolerance`` relative to the largest element."""
    for t in range(len(want.losses)):
        _assert_tree(got.losses[t], want.losses[t], tolerance, f"loss {t}")
        _assert_tree(list(got.outputs[t]), list(want.outputs[t]), tolerance, f"output {t}")
        mine = {name: grad for name, grad in want.gradients[t].items() if name in got.gradients[t]}
        _assert_tree(got.gradients[t], mine, tolerance, f"gradients {t}")
        _assert_tree(got.input_gradients[t], want.input_gradients[t], tolerance, f"input grad {t}")
    assert len(got.losses) == len(want.losses)
    _assert_tree(got.state, want.state, tolerance, "state")


def _assert_tree(got: Any, want: Any, tolerance: float, what: str) -> None:
    got_leaves, got_spec = torch.utils._pytree.tree_flatten(got)
    want_leaves, want_spec = torch.utils._pytree.tree_flatten(want)
    assert got_spec == want_spec, f"{what}: {got_spec} instead of {want_spec}"
    for mine, theirs in zip(got_leaves, want_leaves, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs, what
            continue
        assert mine.dtype == theirs.dtype, what
        if tolerance:
            scale = theirs.abs().max().clamp_min(1e-30) if theirs.numel() else 1.0
            torch.testing.assert_close(mine / scale, theirs / scale, rtol=0, atol=tolerance)
        else:
            assert torch.equal(mine, theirs), f"{what}: {mine} instead of {theirs}"


def plans(num_layers: int) -> dict[str, ModelExecutePlan | None]:
    """Legal plans of every shape for a fused call."""
    n = num_layers
    single = [range(i, i + 1) for i in range(n)]
    return {
        "automatic": None,
        "one stage": ModelExecutePlan([], [range(n)]),
        "one layer per stage": ModelExecutePlan(single[:-1], single[::-1]),
        "uneven": ModelExecutePlan(
            [range(1), range(1, n - 1)], [range(n - 1, n), range(n - 2, n - 1), range(n - 2)]
        ),
        "fused stage of several": ModelExecutePlan([range(n - 3)], [range(n - 3, n), range(n - 3)]),
    }
