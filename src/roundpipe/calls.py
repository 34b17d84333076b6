"""Records of one call: what is run, on which microbatches, by which tasks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .arrivals import Entry
from .config import ResolvedRunConfig
from .context import CallerContext
from .plan import ModelExecutePlan
from .replicas import BufferName
from .transfer import Border, Value

LossFunction = Callable[[Any, Any], Any]


class Phase(enum.Enum):
    """What a stage task does."""

    FORWARD = "forward"
    FUSED = "fused"
    BACKWARD = "backward"


@dataclass(frozen=True)
class StageTask:
    """One stage (or one replica of a wide stage) on one device, for its microbatches.

    Attributes:
        position: place in the call's order of stages; microbatch m may enter when it has left the
            stage at ``position - 1``.
        phase: what to do.
        layers: the stage.
        device: index of the device.
        replica: which replica of a wide stage; 0 for others.
        microbatches: the microbatches it takes, in order.
        next_devices: where microbatch m goes next: ``next_devices[m % len(next_devices)]``; empty
            after the last stage.
    """

    position: int
    phase: Phase
    layers: range
    device: int
    replica: int
    microbatches: range
    next_devices: tuple[int, ...]

    def next_device(self, microbatch: int) -> int | None:
        """Index of the device of the next stage of ``microbatch``; None after the last."""
        if not self.next_devices:
            return None
        return self.next_devices[microbatch % len(self.next_devices)]

    @property
    def label(self) -> str:
        """Position and layers, as errors show them."""
        first, last = self.layers[0], self.layers[-1]
        layers = f"layer {first}" if first == last else f"layers {first}..{last}"
        return f"{self.position} ({layers})"


@dataclass
class BufferHistory:
    """What a layer's buffers held, if its forward changed any during this call.

    Attributes:
        before: for each microbatch, the buffers its forward began with.
        latest: the buffers now.
        changed: names of those that a forward wrote or rebound.
    """

    before: dict[int, dict[BufferName, Value]] = field(default_factory=dict)
    latest: dict[BufferName, Value] = field(default_factory=dict)
    changed: set[BufferName] = field(default_factory=set)


@dataclass
class Chain:
    """One microbatch on its way through the stages.

    Attributes:
        index: the microbatch.
        borders: the state in front of layer i, where known; ``borders[num_layers]`` is the output.
        label: the label's state.
        kept: for each layer that saved data for its recompute, the data.
        sources: the caller's tensors that shall receive gradients, with their values.
        weight: factor on the loss (``loss_reduction="mean"``).
        losses: what the loss function returned, in order.
        losses_are_sequence: whether it returned a sequence.
        output: the model's output, where the caller wants it back from a fused call.
        entry: what it waits for before its first stage; None if everything is there.
    """

    index: int
    borders: dict[int, Border]
    label: Border
    kept: dict[int, Border] = field(default_factory=dict)
    sources: list[tuple[torch.Tensor, Value]] = field(default_factory=list)
    weight: float | None = None
    losses: list[Value] = field(default_factory=list)
    losses_are_sequence: bool = False
    output: Border | None = None
    entry: Entry | None = None


@dataclass
class Call:
    """One ``forward`` or ``forward_backward``, and what its backward needs later.

    Attributes:
        number: calls of the model made before this one.
        run_type: ``"infer"``, ``"train"`` or ``"fused"``.
        config: the options.
        plan: the plan.
        version: the version of the parameters that it reads.
        seed: where its random numbers come from.
        context: the caller's thread-local state.
        chains: the microbatches' states.
        saved: layers in front of which backward needs the state.
        loss_fn: loss function of a fused call.
        return_outputs: whether a fused call hands the outputs back.
        histories: for each layer whose forward changed buffers, what they held.
        gradients_of_parameters: whether backward is for the parameters, too, and not only for the
            inputs (``torch.autograd.grad``).
        keeps_borders: whether backward leaves everything in place for another backward.
    """

    number: int
    run_type: str
    config: ResolvedRunConfig
    plan: ModelExecutePlan
    version: int
    seed: int
    context: CallerContext
    chains: list[Chain]
    saved: frozenset[int] = frozenset()
    loss_fn: LossFunction | None = None
    return_outputs: bool = False
    histories: dict[int, BufferHistory] = field(default_factory=dict)
    gradients_of_parameters: bool = True
    keeps_borders: bool = False

    @property
    def keeps_grad(self) -> bool:
        """Whether a backward follows."""
        return self.run_type != "infer"
