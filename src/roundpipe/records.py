"""What the parameter store notes of each parameter and each layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import nn

from .devices.base import Event
from .gradients import Contributor, GradientSlot
from .workers import Counter


class ParameterRecord:
    """One parameter of the model, however many layers and names share it."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.layers: list[int] = []
        self.master: nn.Parameter | None = None
        self.slots: dict[Contributor, GradientSlot] = {}
        self.has_lost_write = False  # the user's change was overwritten, and he was not told yet
        self._agreed_at = -1

    def slot(self, contributor: Contributor) -> GradientSlot:
        """The slot of one contributor, made when first asked for."""
        found = self.slots.get(contributor)
        if found is None:
            found = self.slots.setdefault(contributor, GradientSlot(self.name))
        return found

    def ensure_master(self, dtype: torch.dtype | None) -> nn.Parameter:
        """The optimizer's copy, made from the parameter's present value when first asked for."""
        if self.master is None:
            source = self.parameter.detach()
            target = dtype if dtype is not None and source.is_floating_point() else source.dtype
            value = torch.empty_like(source, dtype=target, memory_format=torch.preserve_format)
            self.master = nn.Parameter(
                value.copy_(source), requires_grad=self.parameter.requires_grad
            )
            self.note_agreement()
        return self.master

    def note_agreement(self) -> None:
        """Parameter and master hold the same value now."""
        self._agreed_at = _version(self.parameter)

    def note_overwriting(self) -> None:
        """The parameter is about to be overwritten, with what the user may have written into it."""
        if self.was_written:
            self.has_lost_write = True

    @property
    def was_written(self) -> bool:
        """Whether somebody wrote into the parameter since it and its master agreed."""
        return self.master is not None and _version(self.parameter) != self._agreed_at


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; writes through ``.data`` do not count."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass
class LayerRecord:
    """One layer: its module, its parameters, and the counters of the rules above."""

    index: int
    module: nn.Module
    parameters: list[ParameterRecord] = field(default_factory=list)
    reads_declared: int = 0
    reads: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads_issued = Counter(f"reads of layer {self.index}")
        self.published = Counter(f"the published version of layer {self.index}")
        self._reads_lock = threading.Lock()

    def add_read(self, over: Event) -> None:
        """Note a read that is under way, and forget those that are over.

        Where nothing is published, in evaluation or with frozen layers, nobody else would.
        """
        with self._reads_lock:
            self.reads = [read for read in self.reads if not read.query()]
            self.reads.append(over)

    def take_reads(self) -> list[Event]:
        """The reads that may still be under way; whoever asks waits for them."""
        with self._reads_lock:
            reads, self.reads = self.reads, []
            return reads

    @property
    def label(self) -> str:
        """Index and class, as errors show them."""
        return f"{self.index} ({type(self.module).__name__})"

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the layer requires grad now."""
        return any(record.parameter.requires_grad for record in self.parameters)
