"""The parameter store: values, gradients, masters and versions in host memory.

The only object that dispatch and stepping share. Who may read or write when, in terms of counters
that only grow:

    layer.reads_declared   reads (uploads) that runs have announced           caller
    layer.reads_issued     reads under way or over, or given up                device workers
    layer.published        newest version copied into the layer's parameters  optimizer thread
    slot.folded            how often a step was done with the slot's content  optimizer thread

1. All reads of one run see one version: a run reads version `entitled`, and `entitled` changes only
   when a step is submitted or the model is synchronized, never inside a run.
2. Publishing a layer waits for every read announced before the publish was asked for; without that
   an upload could take half old, half new bytes.
3. A read waits for `published >= entitled`; without that it would see the version before.
4. A fold waits for the gradient's copy to host memory; a copy into a slot's buffer waits until the
   step is done with the buffer's last content; without that it would see a mixture of two calls.
5. A step takes the slots' contents when it is submitted: what later calls add is the next step's.
6. After a failed run the contents of all slots are dropped, versions stay.
7. Masters follow what the user writes into a parameter, as long as no newer master waits to be
   published; without that the change would be overwritten. A publish that does overwrite a change
   notes it, and the user is told by the next step or synchronize.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .compat import allows_any_grad_dtype
from .devices.base import Event
from .errors import StateError
from .gradients import Contribution, GradientSlot
from .records import LayerRecord, ParameterRecord
from .workers import Scope

Taken = list[tuple[ParameterRecord, list[Contribution]]]


@dataclass
class Submission:
    """What a step finds when it is submitted.

    Attributes:
        version: the version that the masters hold; the step makes the next one.
        declared: for each layer, the reads that publishing must wait for.
        gradients: what was accumulated since the last step.
    """

    version: int
    declared: list[int]
    gradients: Taken


class ParameterStore:
    """All layers and parameters of one model.

    Args:
        layers: the layers, in order.
        names: for each parameter (by identity) the name shown to users.
        optim_dtype: dtype of floating-point masters; ``None`` keeps each parameter's own.

    Attributes:
        steps_by_layer: whether a step may publish one layer after the other.
    """

    steps_by_layer = True

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
        self.synchronized_version = 0  # the last one that the caller has waited for
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

    def take_gradients(self) -> Taken:
        """Everything accumulated since the last step, for the step now submitted (rule 5)."""
        taken: Taken = []
        for record, slots in self.contents():
            contributions = [slot.take() for slot in slots]
            taken.append((record, [c for c in contributions if c is not None]))
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
        """Add what a step took of one parameter to its master's ``.grad`` (rule 4).

        Contributions that the master now holds as they are must be released when the step is over;
        the others are released already.
        """
        master = record.ensure_master(self.optim_dtype)
        for contribution in contributions:
            is_lent = False
            try:
                content = contribution.wait()
                if master.grad is not None:
                    master.grad = _added(master.grad, content, master.dtype)
                elif len(contributions) == 1 and takes_16_bit(master, content):
                    # An alias: somebody who keeps the gradient can be told from the slot.
                    master.grad, is_lent = content.detach(), contribution.is_buffer
                elif content.dtype == master.dtype and not contribution.is_buffer:
                    master.grad = content
                else:
                    master.grad = content.to(master.dtype, copy=True)
            finally:
                if not is_lent:
                    contribution.release()
        self.mark_dirty(record)

    # --- versions ----------------------------------------------------------------------------

    def mark_dirty(self, record: ParameterRecord) -> None:
        """The record's master has a newer value than its parameter."""
        self._dirty.add(id(record.parameter))

    def mark_published(self, record: ParameterRecord) -> None:
        """The record's parameter holds its master's value."""
        self._dirty.discard(id(record.parameter))
        record.note_agreement()

    def mark_all_dirty(self) -> None:
        """A step function ran: any master may have changed."""
        for record in self.records():
            if record.master is not None:
                self.mark_dirty(record)

    def publish(self, version: int, declared: Sequence[int]) -> None:
        """Copy changed masters into the model's parameters, layer by layer (rule 2).

        Args:
            version: the version the masters hold.
            declared: for each layer, the reads announced when this publish was asked for.
        """
        try:
            for layer in self.layers:
                self.publish_layer(layer, version, declared)
        finally:
            # A failed copy must not leave runs waiting for a version that never comes: the failure
            # itself reaches the user through the step that asked for the publish.
            for layer in self.layers:
                layer.published.advance_to(version)

    def publish_layer(self, layer: LayerRecord, version: int, declared: Sequence[int]) -> None:
        """Copy one layer's changed masters into its parameters."""
        for record in layer.parameters:
            self._publish_parameter(record, declared)
        layer.published.advance_to(version)

    def _publish_parameter(self, record: ParameterRecord, declared: Sequence[int]) -> None:
        if id(record.parameter) not in self._dirty or record.master is None:
            return
        self.wait_unread(record, declared)
        record.note_overwriting()
        with torch.no_grad():
            record.parameter.copy_(record.master)
        self.mark_published(record)

    def wait_unread(self, record: ParameterRecord, declared: Sequence[int]) -> None:
        """Block until all announced reads of the parameter are over (rule 2)."""
        for index in record.layers:
            layer = self.layers[index]
            layer.reads_issued.wait(declared[index], "publishing new parameters")
            for read in layer.take_reads():
                read.synchronize()

    def declared_reads(self) -> list[int]:
        """The reads announced so far, one number for each layer."""
        return [layer.reads_declared for layer in self.layers]

    def refresh_masters(self) -> None:
        """Take the masters' values from the model's parameters (after ``load_state_dict``)."""
        for record in self.records():
            if record.master is not None:
                with torch.no_grad():
                    record.master.copy_(record.parameter)
                self.mark_published(record)

    def follow_user_writes(self) -> None:
        """Masters take over what the user wrote into parameters (rule 7). No step is in flight.

        Raises:
            StateError: see :meth:`report_lost_writes`.
        """
        self.take_user_writes()
        self.report_lost_writes()

    def take_user_writes(self) -> None:
        """As :meth:`follow_user_writes`; what is lost is only noted."""
        for record in self.records():
            self._take_user_write(record)

    def _take_user_write(self, record: ParameterRecord) -> None:
        if record.master is None or not record.was_written:
            return
        if id(record.parameter) in self._dirty:
            record.has_lost_write = True
        else:
            with torch.no_grad():
                record.master.copy_(record.parameter)
        record.note_agreement()

    def report_lost_writes(self) -> None:
        """Tell the user, once, what was overwritten.

        Raises:
            StateError: a parameter was written while its master had a newer value, which was not
                published yet; publishing it has overwritten what was written, or will.
        """
        lost = [record for record in self.records() if record.has_lost_write]
        for record in lost:
            record.has_lost_write = False
        if lost:
            raise StateError(
                f"{', '.join(record.name for record in lost)}: changed in place while a newer "
                "value of the optimizer waited to be published, which overwrites the change; call "
                "synchronize() before, or change the masters (optim_parameters()) inside the step "
                "function"
            )

    def masters(self) -> Iterator[nn.Parameter]:
        """All masters that exist."""
        for record in self.records():
            if record.master is not None:
                yield record.master

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
        if self.synchronized_version == self.submitted_version:
            # No step is in flight, so whoever asks, usually to build an optimizer or to look at
            # the values, gets what load_state_dict() of the inner model has just written.
            self._take_user_write(record)
        return record.ensure_master(self.optim_dtype)


def takes_16_bit(master: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether a 16-bit gradient may be the master's ``.grad`` as it is."""
    return (
        content.dtype in (torch.bfloat16, torch.float16)
        and content.layout is torch.strided
        and master.dtype is torch.float32
        and allows_any_grad_dtype(master)
    )


def _added(grad: torch.Tensor, content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum, in ``dtype`` and in the memory of ``grad`` where that can be."""
    if grad.dtype != dtype:
        grad = grad.to(dtype)  # a 16-bit gradient that the step before left in place
    if grad.layout is not torch.strided and content.layout is torch.strided:
        return content.to(dtype) + grad
    return grad.add_(content)
