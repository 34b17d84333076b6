"""Forward, recompute and backward of one stage on one microbatch.

    forward    state ─▶ layer ─▶ cut ─▶ layer ─▶ cut ─▶ state     one layer's graph at a time
    fused      state ─▶ layer ─▶ layer ─▶ loss ─▶ backward        one graph
    backward   saved state ─▶ layer ─▶ layer ─▶ backward          recompute, one graph

Forward runs with gradients enabled when a backward follows, and throws each layer's graph away. So
layers see the same modes, take the same kernels and mark the same outputs as requiring grad as in a
plain loop, and the recomputed numbers are the first forward's, bitwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .buffer_watch import BufferWatch
from .calls import Chain, Phase
from .errors import InvalidTypeError, InvalidValueError, StateError
from .layer_run import LayerRunner
from .microbatch.tree import flatten, unflatten
from .stage_state import StageRun, State, StateGate
from .stage_weights import StageWeights
from .transfer import Border, Value


class StageCompute:
    """Runs the microbatches of one stage task. Used by the device's worker only."""

    def __init__(self, run: StageRun) -> None:
        self._call = run.call
        self._task = run.task
        self._device = run.device
        self._place = run.place
        self._notes = run.notes
        gate = self._gate = StateGate(run)
        self._layers = LayerRunner(run, gate, BufferWatch(run, gate.fetch))

    def run(self, chain: Chain) -> None:
        """Everything the task does with one microbatch."""
        self._place.microbatch = chain.index
        try:
            self._run(chain)
        finally:
            self._layers.remove_marks()

    def _run(self, chain: Chain) -> None:
        phase = self._task.phase
        with self._device.compute_scope():
            if phase is Phase.FORWARD:
                self._forward(chain)
            elif phase is Phase.FUSED:
                self._fused(chain)
            elif self._call.config.recompute_grain == "layer":
                for index in reversed(self._task.layers):
                    self._backward(chain, range(index, index + 1))
            else:
                self._backward(chain, self._task.layers)

    # --- the three passes --------------------------------------------------------------------

    def _forward(self, chain: Chain) -> None:
        self._place.phase = "forward"
        call, layers = self._call, self._task.layers
        last = layers[-1]
        with call.context.enter(call.keeps_grad):
            state = self._gate.enter(chain.borders[layers[0]])
            self._notes.entered()
            for index in layers:
                output = self._layers.first(index, chain, state)
                saved = index + 1 in call.saved
                if index == last or saved:
                    chain.borders[index + 1] = self._gate.leave(
                        output, state, chain, saved, index == last
                    )
                if index != last:
                    state = self._gate.cut(output, state)
                del output
        if layers[0] not in call.saved:
            chain.borders.pop(layers[0])

    def _fused(self, chain: Chain) -> None:
        self._place.phase = "forward"
        layers = self._task.layers
        with self._call.context.enter(True):
            state = self._gate.enter(chain.borders[layers[0]])
            self._notes.entered()
            output: Any = None
            for index in layers:
                output = self._layers.first(index, chain, state)
                state.tree = output
            if self._call.return_outputs:
                chain.output = self._gate.leave(output, State(None), chain, True, True)
            losses = self._losses(chain, output)
        del output, state.tree
        self._place.phase = "backward"
        self._layers.backward(layers, losses)
        del losses
        self._hand_back(state, chain, layers[0])

    def _losses(self, chain: Chain, output: Any) -> list[torch.Tensor]:
        self._place.phase, self._place.layer = "loss", None
        leaves = [
            self._gate.fetch(leaf) if isinstance(leaf, Value) else leaf
            for leaf in chain.label.leaves
        ]
        label = unflatten(chain.label.structure, leaves)
        loss_fn = self._call.loss_fn
        if loss_fn is None:
            raise RuntimeError("a fused call without a loss function")
        begin = self._notes.now()
        result = self._layers.run_loss(chain, functools.partial(loss_fn, output, label))
        self._notes.ran_loss(begin)
        chain.losses_are_sequence = isinstance(result, list | tuple)
        losses = list(result) if chain.losses_are_sequence else [result]
        for loss in losses:
            _check_loss(loss)
        if chain.weight is not None:
            losses = [loss * chain.weight for loss in losses]
        for loss in losses:
            value = Value()
            value.bring_home(self._device, loss.detach(), self._task.label)
            chain.losses.append(value)
        differentiable = [loss for loss in losses if loss.requires_grad]
        if not differentiable:
            raise StateError(
                "the loss requires no grad, so there is nothing to run backward from: it does not "
                "depend on any parameter or input that requires grad"
            )
        return differentiable

    def _backward(self, chain: Chain, layers: range) -> None:
        border = chain.borders[layers[-1] + 1]
        wanted = [value for value in border.values() if value.grad is not None]
        if wanted:
            self._place.phase = "recompute"
            with self._call.context.enter(True):
                state = self._gate.enter(chain.borders[layers[0]])
                self._notes.entered()
                for index in layers:
                    state.tree = self._layers.again(index, chain, state)
            recompute_end = self._notes.now()
            roots, grads = self._roots(border, state)
            self._notes.recomputed(recompute_end)
            del state.tree
            self._place.phase = "backward"
            if self._call.gradients_of_parameters:
                self._layers.backward(layers, roots, grads)
            elif state.leaves:
                self._layers.backward(layers, roots, grads, state.leaves)
            del roots, grads
            self._hand_back(state, chain, layers[0])
        if not self._call.keeps_borders:
            chain.borders.pop(layers[-1] + 1)
            for index in layers:
                chain.kept.pop(index, None)

    def _roots(self, border: Border, state: State) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Recomputed outputs whose gradient is known, and the gradients."""
        leaves, structure = flatten(state.tree)
        if structure != border.structure:
            raise StateError(
                f"recompute returned {structure}, the forward before it {border.structure}: the "
                "layer depends on something that changed in between"
            )
        roots, grads = [], []
        for leaf, value in zip(leaves, border.leaves, strict=True):
            if not isinstance(value, Value) or value.grad is None:
                continue
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                raise StateError(
                    "recompute returned an output that requires no grad where the forward before "
                    "it returned one that does: the layer depends on something that changed"
                )
            roots.append(leaf)
            # Read only: autograd adds out of place to what others hold.
            grads.append(self._gate.fetch(value.grad, read_only=True))
            value.grad = None
        return roots, grads

    def _hand_back(self, state: State, chain: Chain, first: int) -> None:
        """Gradients of the inputs of layer ``first`` go to the stage in front, or home."""
        inside = first != self._task.layers[0]
        here = inside or self._task.next_device(chain.index) == self._device.index
        for value, grad in zip(state.wanting, state.gradients, strict=False):
            if grad is not None:
                value.grad = Value()
                self._gate.send_on(value.grad, grad, False, here)
        state.gradients.clear()
        self._gate.keep_for_below(state, chain, first)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InvalidTypeError(
            f"the loss function returned a {type(loss).__name__}; return a scalar tensor or a "
            "sequence of them (without a loss function the model's output must be one)"
        )
    if loss.numel() != 1:
        raise InvalidValueError(
            f"the loss of a microbatch has shape {tuple(loss.shape)}; return a scalar, reduced by "
            "sum() or mean() (without a loss function the model's output is the loss: give loss_fn)"
        )


def describe_held(weights: Iterable[StageWeights]) -> str:
    """What the stages on a device hold, for the note on an out-of-memory error."""
    parts = [f"{w.label}: {w.nbytes / 2**20:.1f} MiB of weights" for w in weights]
    return "; ".join(parts)
