"""Running one layer on one microbatch: random numbers, saved data, and where a worker is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .buffer_watch import BufferWatch
from .calls import Chain, Phase
from .habits import attributes, rebound_since
from .microbatch.tree import flatten
from .random_state import BACKWARD, LayerKey, layer_seed
from .recompute import LayerPass, enter_replay, running
from .stage_state import StageRun, State, StateGate
from .trace import logger


class LayerRunner:
    """Runs the layers of one stage task. Used by the device's worker only."""

    def __init__(self, run: StageRun, gate: StateGate, buffers: BufferWatch) -> None:
        self._call = run.call
        self._task = run.task
        self._device = run.device
        self._weights = run.weights
        self._randomness = run.randomness
        self._place = run.place
        self._check = run.check
        self._notes = run.notes
        self._habits = run.habits
        self._gate = gate
        self._buffers = buffers
        self._in_backward = self._seeds_backward = False
        self._marks: list[RemovableHandle] = []

    def first(self, index: int, chain: Chain, state: State) -> Any:
        """A layer's first forward on the microbatch, which may change its buffers."""
        keeps = self._call.keeps_grad and any(begin <= index for begin in self._call.saved)

        def keep(data: tuple[Any, ...]) -> None:
            chain.kept[index] = self._gate.keep_data(data)

        # The fused stage is not recomputed.
        wanted = keeps and self._task.phase is Phase.FORWARD
        layer_pass = LayerPass(keep=keep if wanted else None)
        layer = self._weights.layers[index].module
        before = attributes(layer) if self._habits.wants_attributes((index, layer.training)) else []
        with self._buffers.watching(index, chain):
            output = self._run(index, chain, state, layer_pass)
        names = rebound_since(before)
        if names:
            logger.warning(
                "layer %d (%s) rebinds %s in its forward. Forwards run on replicas of the layer, "
                "with which that is lost: use a buffer (register_buffer), or return it. "
                "roundpipe.verify tells more",
                index, type(layer).__name__, ", ".join(names[:4]),
            )  # fmt: skip
        return output

    def again(self, index: int, chain: Chain, state: State) -> Any:
        """The layer's recompute on the microbatch."""
        self._buffers.rewind(index, chain)

        def load() -> tuple[Any, ...] | None:
            border = chain.kept.get(index)
            return None if border is None else self._gate.load_data(border)

        return self._run(index, chain, state, LayerPass(load=load))

    def backward(
        self,
        layers: range,
        roots: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Backward through ``layers``, from ``roots``, to all parameters or to ``inputs`` only."""
        self._notes.backward()
        # Here and below no closure holds tensors: one that is in an error's traceback cannot be
        # emptied, and would keep them on a device that has run out of memory.
        run = functools.partial(self._run_backward, roots, grads, inputs)
        if not self._call.config.preserve_rng_state:
            run(False)
        else:
            keys = tuple((i, self._weights.layers[i].module.training, True) for i in layers)
            # A layer that runs again within backward draws from the device's generator, too.
            lock = self._device.random_lock if self._randomness.may_draw(keys) else None
            with lock or contextlib.nullcontext():
                self._randomness.run_backward(keys, run)
        self._notes.backward_ended()

    def _run_backward(
        self,
        roots: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None,
        inputs: Sequence[torch.Tensor] | None,
        draws: bool,
    ) -> None:
        self._in_backward, self._seeds_backward = True, draws
        try:
            torch.autograd.backward(roots, grads, inputs=inputs)
        finally:
            self._in_backward = False
            enter_replay(None)

    def run_loss(self, chain: Chain, loss_fn: Callable[[], Any]) -> Any:
        """The loss function, which may draw random numbers like one more layer."""
        if not self._call.config.preserve_rng_state:
            return loss_fn()
        behind = self._task.layers.stop
        return self._draw((behind, True, True), chain, loss_fn)

    def _run(self, index: int, chain: Chain, state: State, layer_pass: LayerPass) -> Any:
        self._check()
        self._place.layer = index
        args, kwargs = state.tree if index == 0 else ((state.tree,), {})
        with running(layer_pass):
            if not self._call.config.preserve_rng_state:
                output = self._call_layer(index, args, kwargs)
            else:
                layer = self._weights.layers[index]
                key = (index, layer.module.training, torch.is_grad_enabled())
                variant = _signature((args, kwargs)) if layer.is_compiled else None
                call = functools.partial(self._call_layer, index, args, kwargs)
                output = self._draw(key, chain, call, variant)
        if self._task.phase is not Phase.FORWARD:
            self._mark(index, chain, output, layer_pass)
        return output

    def _draw(
        self, key: LayerKey, chain: Chain, function: Callable[[], Any], variant: object = None
    ) -> Any:
        seed = layer_seed(self._call.seed, chain.index, key[0])
        # Between seeding and drawing, another logical device of the same accelerator would take
        # this layer's numbers.
        with self._device.random_lock or contextlib.nullcontext():
            self._device.seed(seed)
            return self._randomness.run(key, seed, function, variant)

    def _call_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        notes = self._notes
        held_bytes = notes.held_bytes() if notes.wants_sizes else 0
        begin = notes.now()
        output = self._weights.layers[index].module(*args, **kwargs)
        notes.ran(index, begin)
        if notes.wants_sizes:
            notes.sizes(index, (args, kwargs), output, notes.held_bytes() - held_bytes)
        return output

    def _mark(self, index: int, chain: Chain, output: Any, layer_pass: LayerPass) -> None:
        """When backward reaches the layer's output, the worker is in that layer."""
        leaves = [output] if isinstance(output, torch.Tensor) else flatten(output)[0]
        marked = next((x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if marked is None:
            return
        replayed = layer_pass if layer_pass.asked else None

        def arrive(_grad: torch.Tensor) -> None:
            self._check()
            if not self._in_backward:
                return  # the next layer differentiates with respect to its input, in its forward
            self._place.layer = index
            self._notes.reached(index)
            enter_replay(replayed)
            if self._seeds_backward:
                seed = layer_seed(self._call.seed ^ BACKWARD, chain.index, index)
                self._device.seed(seed)
                torch.default_generator.manual_seed(seed)

        self._notes.marked(index)
        self._marks.append(marked.register_hook(arrive))

    def remove_marks(self) -> None:
        """The microbatch is through, or has failed.

        A failure's traceback holds the graph, the graph the marks, and they the run, which holds
        the failure: a circle that Python cannot collect, since the graph is not Python's.
        """
        for mark in self._marks:
            mark.remove()
        self._marks.clear()


def _signature(tree: Any) -> tuple[object, ...]:
    """What a compiler looks at before it decides to compile once more."""
    return tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else 0
        for leaf in flatten(tree)[0]
    )
