"""The parameter store: values, gradients, masters and versions in host memory.

The only object that dispatch and stepping share. Who may read or write when, in terms of counters
that only grow:

    layer.reads_declared   reads (uploads) that runs have announced           caller
    layer.reads_issued     reads under way or over, or given up                device workers
    layer.published        newest version copied into the layer's parameters  optimizer thread
    slot.folded            how often the slot's content went into a master    optimizer thread

1. All reads of one run see one version: a run reads version `entitled`, and `entitled` changes only
   when a step is submitted or the model is synchronized, never inside a run.
2. Publishing a layer waits for every read announced before the publish was asked for; without that
   an upload could take half old, half new bytes.
3. A read waits for `published >= entitled`; without that it would see the version before.
4. A fold waits for the gradient's copy to host memory; a copy into a slot's buffer waits until the
   buffer's last content was folded; without that a step would see a mixture of two calls.
5. A step takes the slots' contents when it is submitted: what later calls add is the next step's.
6. After a failed run the contents of all slots are dropped, versions stay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .devices.base import Event
from .errors import StateError
from .workers import Counter, Scope

Contributor = tuple[int, int]  # (layer, replica of a wide stage)


class GradientSlot:
    """The accumulated gradient that one (layer, replica) contributes to one parameter."""

    def __init__(self, name: str) -> None:
        self.content: torch.Tensor | None = None
        self.ready: Event | None = None
        self.buffer: torch.Tensor | None = None
        self.taken = 0
        self.folded = Counter(f"folds of the gradient of {name}")

    def put(self, content: torch.Tensor, ready: Event | None) -> None:
        """The gradient of the calls since the last step, complete once ``ready`` has passed."""
        self.content, self.ready = content, ready

    def take(self) -> tuple[torch.Tensor, Event | None] | None:
        """Hand the content to a step; the slot is empty afterwards."""
        if self.content is None:
            return None
        content, ready = self.content, self.ready
        self.taken += 1
        self.drop()
        return content, ready

    def drop(self) -> None:
        """Forget the content."""
        self.content = self.ready = None

    def wait_buffer_free(self, who: str, scope: Scope | None) -> None:
        """Block until a step has folded what it took: the buffer may be written again."""
        self.folded.wait(self.taken, who, scope)


class ParameterRecord:
    """One parameter of the model, however many layers and names share it."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.layers: list[int] = []
        self.master: nn.Parameter | None = None
        self.slots: dict[Contributor, GradientSlot] = {}

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
        return self.master


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


Contribution = tuple[GradientSlot, torch.Tensor, Event | None]


class ParameterStore:
    """All layers and parameters of one model.

    Args:
        layers: the layers, in order.
        names: for each parameter (by identity) the name shown to users.
        optim_dtype: dtype of floating-point masters; ``None`` keeps each parameter's own.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: dict[int, str],
        optim_dtype: torch.dtype | None,
    ) -> None:
        self.optim_dtype = optim_dtype
        self.layers = [LayerRecord(index, module) for index, module in enumerate(layers)]
        self._names = names
        self._records: dict[int, ParameterRecord] = {}
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self.submitted_version = 0  # versions made or in the making: one for each submitted step
        self.entitled_version = 0  # the version that runs read now
        for layer in self.layers:
            self.scan(layer)

    def scan(self, layer: LayerRecord) -> None:
        """Note the parameters that the layer's modules hold now."""
        records = []
        for parameter in layer.module.parameters():
            record = self.record(parameter)
            if layer.index not in record.layers:
                record.layers.append(layer.index)
            records.append(record)
        layer.parameters = records

    def record(self, parameter: nn.Parameter) -> ParameterRecord:
        """The record of a parameter, made when first asked for."""
        with self._lock:
            found = self._records.get(id(parameter))
            if found is None:
                name = self._names.get(id(parameter), f"parameter {len(self._records)}")
                found = self._records[id(parameter)] = ParameterRecord(name, parameter)
            return found

    def records(self) -> Iterator[ParameterRecord]:
        """All records, in order of layers."""
        with self._lock:
            yield from list(self._records.values())

    # --- reads -------------------------------------------------------------------------------

    def declare_reads(self, layers: Sequence[int]) -> None:
        """A run announces the reads it will make; a publish asked for later waits for them."""
        for index in layers:
            self.layers[index].reads_declared += 1

    def readable(self, index: int, version: int) -> bool:
        """Whether a read of the layer at ``version`` would not wait."""
        return self.layers[index].published.value >= version

    def wait_readable(self, index: int, version: int, who: str, scope: Scope) -> None:
        """Block until the layer's parameters hold ``version`` (rule 3)."""
        self.layers[index].published.wait(version, who, scope)

    def read_issued(self, index: int, over: Event | None) -> None:
        """An announced read is on its way (over when the event has passed), over, or given up."""
        layer = self.layers[index]
        if over is not None:
            layer.add_read(over)
        layer.reads_issued.advance()

    # --- gradients ---------------------------------------------------------------------------

    def contents(self) -> Iterator[tuple[ParameterRecord, list[GradientSlot]]]:
        """Each record that has accumulated gradients, with its slots in their fixed order."""
        for record in self.records():
            # Highest layer first, as backward meets them: the order of the sum never changes.
            slots = [record.slots[key] for key in sorted(record.slots, reverse=True)]
            filled = [slot for slot in slots if slot.content is not None]
            if filled:
                yield record, filled

    def take_gradients(self) -> list[tuple[ParameterRecord, list[Contribution]]]:
        """Everything accumulated since the last step, for the step now submitted (rule 5)."""
        taken = []
        for record, slots in self.contents():
            contributions: list[Contribution] = []
            for slot in slots:
                content = slot.take()
                if content is not None:
                    contributions.append((slot, *content))
            taken.append((record, contributions))
        return taken

    def holds_gradients(self) -> bool:
        """Whether anything was accumulated since the last step."""
        return any(True for _ in self.contents())

    def drop_gradients(self) -> bool:
        """Forget everything accumulated since the last step. Returns whether there was any."""
        dropped = False
        for _, slots in self.contents():
            for slot in slots:
                slot.drop()
                dropped = True
        return dropped

    def adopt_user_gradients(self) -> None:
        """Gradients that the user put on the parameters by hand are added to, as in PyTorch."""
        for record in self.records():
            grad = record.parameter.grad
            if grad is None or not record.layers:
                continue
            slot = record.slot((record.layers[-1], 0))
            if slot.content is None:
                slot.put(grad.detach(), None)
            elif slot.content is not grad:
                if slot.ready is not None:
                    slot.ready.synchronize()
                slot.content.add_(grad.detach())
            record.parameter.grad = None

    def expose_gradients(self) -> None:
        """Put accumulated, not yet stepped gradients into the parameters' ``.grad``."""
        for record, slots in self.contents():
            total: torch.Tensor | None = None
            for slot in slots:
                if slot.ready is not None:
                    slot.ready.synchronize()
                content = slot.content
                if content is not None:
                    total = content.clone() if total is None else total.add_(content)
                slot.drop()
            record.parameter.grad = total

    def fold(self, record: ParameterRecord, contributions: Sequence[Contribution]) -> None:
        """Add what a step took of one parameter to its master's ``.grad`` (rule 4)."""
        master = record.ensure_master(self.optim_dtype)
        for slot, content, ready in contributions:
            try:
                if ready is not None:
                    # The copy to host memory runs on a stream of its own; adding before it is
                    # through would add what the buffer held before.
                    ready.synchronize()
                owned = content is not slot.buffer
                if master.grad is not None:
                    master.grad.add_(content)
                elif owned and content.dtype == master.dtype:
                    master.grad = content
                else:
                    master.grad = content.to(master.dtype, copy=True)
            finally:
                slot.folded.advance()
        self._dirty.add(id(record.parameter))

    # --- versions ----------------------------------------------------------------------------

    def mark_all_dirty(self) -> None:
        """A step function ran: any master may have changed."""
        for record in self.records():
            if record.master is not None:
                self._dirty.add(id(record.parameter))

    def publish(self, version: int, declared: Sequence[int]) -> None:
        """Copy changed masters into the model's parameters, layer by layer (rule 2).

        Args:
            version: the version the masters hold.
            declared: for each layer, the reads announced when this publish was asked for.
        """
        try:
            for layer in self.layers:
                for record in layer.parameters:
                    self._publish_parameter(record, declared)
                layer.published.advance_to(version)
        finally:
            # A failed copy must not leave runs waiting for a version that never comes: the failure
            # itself reaches the user through the step that asked for the publish.
            for layer in self.layers:
                layer.published.advance_to(version)

    def _publish_parameter(self, record: ParameterRecord, declared: Sequence[int]) -> None:
        key = id(record.parameter)
        if key not in self._dirty or record.master is None:
            return
        for index in record.layers:
            layer = self.layers[index]
            layer.reads_issued.wait(declared[index], "publishing new parameters")
            for read in layer.take_reads():
                read.synchronize()
        with torch.no_grad():
            record.parameter.copy_(record.master)
        self._dirty.discard(key)

    def declared_reads(self) -> list[int]:
        """The reads announced so far, one number for each layer."""
        return [layer.reads_declared for layer in self.layers]

    def refresh_masters(self) -> None:
        """Take the masters' values from the model's parameters (after ``load_state_dict``)."""
        for record in self.records():
            if record.master is not None:
                with torch.no_grad():
                    record.master.copy_(record.parameter)
                self._dirty.discard(id(record.parameter))

    def has_master(self, parameter: nn.Parameter) -> bool:
        """Whether a master of the parameter exists."""
        record = self._records.get(id(parameter))
        return record is not None and record.master is not None

    def copy_masters_to(self, other: ParameterStore) -> None:
        """Give the store of an equal model masters with these values."""
        for mine, theirs in zip(self.records(), other.records(), strict=True):
            if mine.master is not None:
                with torch.no_grad():
                    theirs.ensure_master(other.optim_dtype).copy_(mine.master)

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of one of the model's parameters.

        Raises:
            StateError: the parameter belongs to no layer of the model.
        """
        record = self._records.get(id(parameter))
        if record is None:
            raise StateError(
                "a parameter of the model belongs to none of its layers, so it cannot be trained; "
                "register it in a layer"
            )
        return record.ensure_master(self.optim_dtype)
