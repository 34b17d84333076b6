"""The same batch through roundpipe, under several plans, held against the plain loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.config import RoundPipeRunConfig
from roundpipe.devices import DevicePool
from roundpipe.microbatch.tree import flatten
from roundpipe.pipeline import RoundPipe
from roundpipe.plan import ModelExecutePlan

from .plain import Seen, Task, detached, label_of, layers_of, results_of
from .report import Report

TIED_ROUNDINGS = 8  # a tied parameter's gradient is a sum in another order
GRAINS = ("stage", "layer")
ATOMS = (bool, int, float, complex, str, bytes)  # of other objects only the class is compared


def plans_of(num_layers: int) -> Iterator[tuple[str, ModelExecutePlan]]:
    """Plans of several shapes, with names."""
    yield "one stage", ModelExecutePlan([], [range(num_layers)])
    if num_layers > 1:
        single = [range(i, i + 1) for i in range(num_layers)]
        yield "a stage for each layer", ModelExecutePlan(single[:-1], single[::-1])
    if num_layers > 2:
        half = num_layers // 2
        yield "two stages", ModelExecutePlan([range(half)], [range(half, num_layers), range(half)])


def run_roundpipe(
    model: nn.Module, task: Task, count: int, pool: DevicePool, plan: ModelExecutePlan, grain: str
) -> Seen:
    """One fused call on a copy of ``model``."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    layers = layers_of(twin)
    seen = Seen([[] for _ in layers])
    for index, layer in enumerate(layers):
        if _is_called_in_one_place(layer, index, layers):
            layer.register_forward_hook(_recorder(seen.outputs[index]))
    config = RoundPipeRunConfig(
        num_microbatch=count, execute_plan=plan, recompute_grain=grain, requires_grad=True,
        loss_reduction=task.loss_reduction, merge_output=list,
    )  # fmt: skip
    batch = task.split(1).microbatches[0]
    torch.manual_seed(task.seed)
    with RoundPipe(twin, name="verify", devices=pool, model_run_config=config) as pipe:
        loss = pipe.forward_backward(batch.args, batch.kwargs, batch.label, task.loss_fn)
        pipe.synchronize()
    seen.loss = loss if isinstance(loss, list) else [loss]
    results_of(seen, twin)
    return seen


def _is_called_in_one_place(layer: nn.Module, index: int, layers: list[nn.Module]) -> bool:
    """Whether a hook on the layer hears this layer alone.

    One object may be several layers, or lie within others, too. What it returns wrongly shows in
    the outputs of the next layers, the loss and the gradients.
    """
    others = [*layers[:index], *layers[index + 1 :]]
    return all(module is not layer for other in others for module in other.modules())


def _recorder(outputs: list[Any]) -> Any:
    # Hooks are shared by the replicas; forwards of one layer follow each other, as microbatches do.
    def record(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.append(detached(output))

    return record


def compare(
    model: nn.Module, want: Seen, task: Task, count: int, pool: DevicePool, report: Report,
    grains: Iterator[str],
) -> None:  # fmt: skip
    """Hold roundpipe against the plain loop's ``want``, plan by plan."""
    for name, plan in plans_of(len(layers_of(model))):
        grain = next(grains)
        run = f"{name}, {count} microbatches, grain {grain}"
        try:
            got = run_roundpipe(model, task, count, pool, plan, grain)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what we want to know
            report.add("error", _layer_in_notes(error), f"{type(error).__name__}: {error} ({run})")
            continue
        report.compared.append(run)
        for layer, text in differences(model, got, want, count):
            report.add("difference", layer, f"{text} ({run})")
            break


def differences(model: nn.Module, got: Seen, want: Seen, count: int) -> Iterator[tuple[str, str]]:
    """What differs, in the order in which it is computed: the layer, and a text."""
    for index, expected in enumerate(want.outputs):
        outputs = got.outputs[index]
        for microbatch, output in enumerate(outputs):
            if not same(output, expected[microbatch % count]):
                what = "output" if microbatch < count else "recomputed output"
                yield label_of(model, index), f"its {what} for microbatch {microbatch % count}"
    if not same(got.loss, want.loss):
        yield "loss_fn", f"the loss is {_numbers(got.loss)} instead of {_numbers(want.loss)}"
    tied = _tied(model)
    # The last layer's gradients come first.
    for name, gradient in reversed(want.gradients.items()):
        tolerance = 0.0
        if name in tied and gradient is not None:
            tolerance = TIED_ROUNDINGS * torch.finfo(gradient.dtype).eps
        if not same(got.gradients[name], gradient, tolerance):
            yield _layer_of_name(model, name), f"the gradient of {name}"
    for name, buffer in want.buffers.items():
        if not same(got.buffers.get(name), buffer):
            yield _layer_of_name(model, name), f"the buffer {name}"


def same(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    """Whether two trees hold the same numbers."""
    leaves, structure = flatten(one)
    others, structure_of_other = flatten(other)
    if structure != structure_of_other:
        return False
    return all(
        same_tensor(a, b, tolerance)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and (not isinstance(a, ATOMS) or a == b)
        for a, b in zip(leaves, others, strict=True)
    )


def same_tensor(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Bitwise (any NaN like any other), or to ``tolerance`` relative to the largest element."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    one, other = one.nan_to_num(), other.nan_to_num()
    if tolerance == 0.0 or one.numel() == 0:
        return torch.equal(one, other)
    return bool(((one - other).abs() <= tolerance * other.abs().max()).all())


def _layer_of_name(model: nn.Module, name: str) -> str:
    if not isinstance(model, nn.Sequential):
        return label_of(model, 0)
    names = [child for child, _ in model.named_children()]
    # A layer that occurs twice is a child once, under its first name.
    keys = list(itertools.chain(model._modules))
    head = name.split(".", maxsplit=1)[0]
    return label_of(model, keys.index(head)) if head in names else "the model"


def _tied(model: nn.Module) -> set[str]:
    first: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied.add(known)
    return tied


def _layer_in_notes(error: BaseException) -> str:
    for note in getattr(error, "__notes__", []):
        for part in str(note).split(", "):
            if part.startswith("layer "):
                return part
    return "the model"


def _numbers(losses: Any) -> str:
    return ", ".join(f"{float(loss):.6g}" for loss in losses)
