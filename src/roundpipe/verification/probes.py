"""Looking at one layer after the other for what roundpipe cannot repeat or carry."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.errors import RoundPipeError
from roundpipe.microbatch import merge_outputs, split_batch
from roundpipe.microbatch.tree import flatten, unflatten

from .compare import same
from .fingerprints import attributes_of, changed, foreign_random_state, surroundings_of
from .plain import Task, call_layer, copied, detached, label_of, layers_of, losses_of
from .report import Report

LOSS = "loss_fn"
NEAR = 1e-4  # relative; a sum in another order is nearer, another formula is not


class Prober:
    """Walks one batch through a copy of the model.

    Args:
        model: the user's model; only copies of it are run.
        task: the batch and the loss function.
        report: where findings go.
    """

    def __init__(self, model: nn.Module, task: Task, report: Report) -> None:
        self._model = copy.deepcopy(model)
        self._task = task
        self._report = report

    def run(self) -> None:
        """All probes on all layers, then those on the loss function."""
        piece = self._task.split(1).microbatches[0]
        state: Any = (piece.args, piece.kwargs)
        for index, layer in enumerate(layers_of(self._model)):
            given, state = state, self._probe_layer(index, layer, state)
            self._probe_device(index, layer, given)
            if not {"recompute", "random"} & set(self._report.of(label_of(self._model, index))):
                self._probe_cutting(index, layer, given)
        self._probe_loss(state, piece.label)

    def _add(self, kind: str, index: int, text: str) -> None:
        self._report.add(kind, label_of(self._model, index), text)

    # --- state that a forward leaves behind --------------------------------------------------

    def _probe_layer(self, index: int, layer: nn.Module, given: Any) -> Any:
        """Run a layer twice from the same state, as recompute does. Returns its first output."""
        buffers = [(b, b.detach().clone()) for b in layer.buffers()]
        holders = [(m, dict(m._buffers)) for m in layer.modules()]
        attributes, around = attributes_of(layer), surroundings_of(layer)
        foreign = foreign_random_state()
        outputs = []
        for _ in range(2):
            torch.manual_seed(self._task.seed + index)
            result = call_layer(layer, index, copied(given, index == 0))
            outputs.append(detached(result))
            if len(outputs) == 1:
                self._report_writes(index, layer, attributes, around, foreign)
                _restore(buffers, holders)
        if not same(outputs[0], outputs[1]):
            self._add(
                "recompute", index,
                "run again from the same input, buffers and random numbers it returned something "
                "else; keep what it decided with save_for_recompute, or make it depend on its "
                "input only",
            )  # fmt: skip
        return copied(result)

    def _report_writes(
        self, index: int, layer: nn.Module, attributes: Any, around: Any, foreign: Any
    ) -> None:
        names = changed(attributes, attributes_of(layer))
        if names:
            self._add(
                "attribute", index,
                f"{', '.join(names[:4])}; on a device a forward runs on a replica of the layer, "
                "with which rebound attributes are lost, and once more in recompute: use a buffer "
                "(register_buffer), or return it",
            )  # fmt: skip
        names = changed(around, surroundings_of(layer))
        if names:
            self._add(
                "global", index,
                f"{', '.join(names[:4])}; layers run on several threads, and once more in "
                "recompute: use a buffer (register_buffer), or return it",
            )  # fmt: skip
        names = changed(foreign, foreign_random_state())
        if names:
            self._add(
                "random", index,
                f"{' and '.join(names)}; recompute would draw others: use torch's generator, or "
                "keep what was drawn with save_for_recompute",
            )  # fmt: skip

    # --- devices -----------------------------------------------------------------------------

    def _probe_device(self, index: int, layer: nn.Module, given: Any) -> None:
        """On the meta device everything is where the layer's input is, or an operator says no."""
        try:
            elsewhere = copy.deepcopy(layer).to("meta")
            state = _to(given, "meta")
        except Exception:  # noqa: BLE001 - what cannot be moved this way cannot be asked
            return
        try:
            with torch.no_grad():
                output = call_layer(elsewhere, index, state)
        except Exception as error:  # noqa: BLE001 - only some of them are about devices
            reason = str(error).splitlines()[0] if str(error) else ""
            if _is_about_devices(reason):
                self._add_device(index, f"with its input on another device: {reason}")
            return
        strays = [
            leaf for leaf in flatten(output)[0]
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.dim()
        ]  # fmt: skip
        if strays:
            self._add_device(index, f"it returned a tensor on {strays[0].device}")

    def _add_device(self, index: int, text: str) -> None:
        self._add("device", index, f"{text}; make tensors with device=x.device of an input x")

    # --- cutting the batch -------------------------------------------------------------------

    def _probe_cutting(self, index: int, layer: nn.Module, given: Any) -> None:
        """Half a batch after the other must give the rows of the whole."""
        layer = copy.deepcopy(layer)
        for module in layer.modules():
            if type(module).__name__.endswith(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")):
                module.eval()
        torch.manual_seed(self._task.seed)
        before = torch.default_generator.get_state()
        # Gradients stay on: layers may choose other kernels without.
        whole = detached(call_layer(layer, index, copied(given, index == 0)))
        if not torch.equal(before, torch.default_generator.get_state()):
            return  # another draw for each half, so nothing can be said
        try:
            halves = [
                detached(call_layer(layer, index, copied(half, index == 0)))
                for half in _halves(index, given)
            ]
            merged = merge_outputs(halves, None)
        except Exception:  # noqa: BLE001 - what cannot be cut is told where it is compared
            return
        if _differ_by_row(whole, merged):
            self._add(
                "batch", index,
                "half of the batch after the other gives other numbers than the whole batch: it "
                "computes statistics over rows. With roundpipe they are those of a microbatch, as "
                "in gradient accumulation; use a norm over features (LayerNorm, GroupNorm) if that "
                "matters",
            )  # fmt: skip

    def _probe_loss(self, output: Any, label: Any) -> None:
        """The loss of the batch against the sum over its halves, from the same outputs."""
        task = self._task
        around = surroundings_of(_AsModule(task.loss_fn))
        torch.manual_seed(task.seed)
        whole = _total(task.loss_fn(copied(output), copied(label)))
        names = changed(around, surroundings_of(_AsModule(task.loss_fn)))
        if names:
            self._report.add("global", LOSS, f"{', '.join(names)}; it runs once a microbatch")
        tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        if all(leaf.dim() == 0 for leaf in tensors):
            return  # the model computed the loss, and nothing is left to cut
        try:
            batch = split_batch((output,), {}, label, 2, None, None, warned=set())
            parts = []
            for piece in batch.microbatches:
                part = _total(task.loss_fn(copied(piece.args[0]), copied(piece.label)))
                if task.loss_reduction == "mean" and piece.rows and batch.rows:
                    part *= piece.rows / batch.rows
                parts.append(part)
        except Exception:  # noqa: BLE001 - an output that cannot be cut tells nothing
            return
        if len(parts) == 2 and abs(sum(parts) - whole) > NEAR * max(abs(whole), 1e-6):
            mean = abs(sum(parts) / 2 - whole) <= 0.2 * abs(whole)
            hint = (
                'it looks like a mean: give loss_reduction="mean", or divide by num_microbatch'
                if mean and task.loss_reduction == "sum"
                else "the reported loss and the gradients are those of the sum over microbatches"
            )
            self._report.add(
                "loss", LOSS,
                f"the whole batch gives {whole:.6g}, its two halves together {sum(parts):.6g}; "
                f"{hint}",
            )  # fmt: skip


class _AsModule(nn.Module):
    """A loss function, to be looked at like a layer's code."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.__class__ = type("Loss", (nn.Module,), {"forward": function})


def _restore(
    buffers: list[tuple[torch.Tensor, torch.Tensor]],
    holders: list[tuple[nn.Module, dict[str, torch.Tensor | None]]],
) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            if buffer.shape == value.shape:
                buffer.copy_(value)
    for module, held in holders:
        module._buffers.clear()
        module._buffers.update(held)


def _to(tree: Any, device: str) -> Any:
    leaves, structure = flatten(tree)
    moved = [
        leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    return unflatten(structure, moved)


def _is_about_devices(reason: str) -> bool:
    text = reason.lower()
    words = ("same device", "expected device", "out of meta tensor", "cuda", "device mismatch")
    return any(word in text for word in words) and "aten::" not in text.split("(")[0]


def _halves(index: int, given: Any) -> Iterator[Any]:
    args, kwargs = given if index == 0 else ((given,), {})
    for piece in split_batch(args, dict(kwargs), None, 2, None, None, warned=set()).microbatches:
        yield (piece.args, piece.kwargs) if index == 0 else piece.args[0]


def _differ_by_row(whole: Any, merged: Any) -> bool:
    leaves, structure = flatten(whole)
    others, structure_of_other = flatten(merged)
    if structure != structure_of_other:
        return False
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if one.dim() == 0 or one.shape != other.shape or not one.is_floating_point():
            continue
        scale = float(one.abs().max().clamp_min(1e-6)) if one.numel() else 1.0
        if one.numel() and float((one - other).abs().max()) > NEAR * scale:
            return True
    return False


def _total(result: Any) -> float:
    return sum(float(loss.detach().sum()) for loss in losses_of(result))


def explain(error: BaseException) -> str:
    """An exception of the user's code, in one line."""
    first = str(error).splitlines()[0] if str(error) else ""
    own = " (raised by roundpipe)" if isinstance(error, RoundPipeError) else ""
    return f"{type(error).__name__}: {first}{own}"
