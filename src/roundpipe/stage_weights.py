"""One stage on one device: its weights arriving, its layers ready to run, its gradients leaving.

    plan ─▶ issue, issue, .. (between activations) ─▶ arrive ─▶ compute ─▶ send gradients ─▶ release

A device holds at most two of these: the stage that runs and the one whose weights are arriving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .compat import has_post_accumulate_hooks, share_hooks, storage_addresses
from .devices.base import Category, Device, Event, Stream
from .errors import InvalidTypeError, StateError
from .gradients import Contributor, GradientSlot
from .parameters import ParameterStore
from .records import ParameterRecord
from .replicas import LayerOnDevice, replicate
from .transfer import ChunkedUpload, Transfer, download
from .workers import Scope


class StageWeights:
    """The weights of one stage task on its device. Used by the device's worker only.

    Args:
        device: the device.
        store: the parameter store.
        layers: the stage.
        contributor_replica: which replica of a wide stage this is.
        keeps_grad: whether the task runs backward, so that gradients accumulate here.
        accumulate_dtype: dtype in which gradients accumulate; ``None`` for the parameter's own.
    """

    def __init__(
        self,
        device: Device,
        store: ParameterStore,
        layers: range,
        contributor_replica: int,
        keeps_grad: bool,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self.device = device
        self.layers: dict[int, LayerOnDevice] = {}
        self._store = store
        self._range = layers
        self._replica = contributor_replica
        self._keeps_grad = keeps_grad
        self._accumulate_dtype = accumulate_dtype
        self._upload = ChunkedUpload(device)
        self.transfers: list[Transfer] = []  # for the log
        self._leaves: dict[int, tuple[ParameterRecord, nn.Parameter]] = {}
        self._owners: dict[int, int] = {}
        self._seeds: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._pending_reads = list(layers)
        self._storages: set[int] | None = None
        self._buffers: list[torch.Tensor] = []
        self._plan()

    def _plan(self) -> None:
        leaves: dict[int, nn.Parameter] = {}
        buffers: dict[int, torch.Tensor] = {}
        for index in self._range:
            layer = self._store.layers[index]
            self._store.scan(layer)
            for record in layer.parameters:
                key = id(record.parameter)
                self._owners[key] = index  # the highest layer of the stage that holds it
                if key not in leaves:
                    leaves[key] = self._place_parameter(record)
                    self._leaves[key] = (record, leaves[key])
            for buffer in layer.module.buffers():
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = self._upload.add(buffer.detach(), Category.WEIGHTS)
        if self._keeps_grad:
            for record, leaf in self._leaves.values():
                self._place_gradient(record, leaf)
        # Kept until `release`, although replicas hold them too: a layer may rebind a buffer while
        # compute still reads the old one, whose memory the weights stream would get back.
        self._buffers = list(buffers.values())
        for index in self._range:
            module = self._store.layers[index].module
            self.layers[index] = LayerOnDevice(module, replicate(module, leaves, buffers))

    def _place_parameter(self, record: ParameterRecord) -> nn.Parameter:
        source = record.parameter.detach()
        if not self.device.shares_host_memory:
            source = self._upload.add(source, Category.WEIGHTS)
        leaf = nn.Parameter(source, requires_grad=record.parameter.requires_grad)
        if record.parameter.__dict__:
            leaf.__dict__.update(record.parameter.__dict__)
        if self._keeps_grad:
            share_hooks(record.parameter, leaf)
            if has_post_accumulate_hooks(record.parameter):
                raise StateError(
                    f"parameter {record.name!r} has a hook for after its gradient was accumulated, "
                    "which would see a device's copy of the parameter; do in step_fn what it does"
                )
        return leaf

    def _slot(self, record: ParameterRecord) -> GradientSlot:
        contributor: Contributor = (self._owners[id(record.parameter)], self._replica)
        return record.slot(contributor)

    def _place_gradient(self, record: ParameterRecord, leaf: nn.Parameter) -> None:
        """What earlier calls accumulated comes along, and this call adds to it on the device."""
        if not leaf.requires_grad:
            return
        if self._accumulate_dtype is not None and leaf.is_floating_point():
            leaf.grad_dtype = self._accumulate_dtype
        slot = self._slot(record)
        if slot.content is None:
            return
        content, ready = slot.content, slot.ready
        slot.drop()
        if not self.device.shares_host_memory:
            if ready is not None:
                # The content may still be on its way home from the device that computed it.
                self.device.wait(Stream.WEIGHTS, ready)
            content = self._upload.add(content, Category.GRADIENTS)
        self._seeds.append((leaf, content))

    @property
    def remaining_bytes(self) -> int:
        """Bytes of the upload that were not issued yet."""
        return self._upload.remaining_bytes

    @property
    def label(self) -> str:
        """The stage's layers, as errors show them."""
        return f"layers {self._range[0]}..{self._range[-1]}"

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(leaf.numel() * leaf.element_size() for _, leaf in self._leaves.values())

    def holds_storage(self, address: int) -> bool:
        """Whether the memory at ``address`` is that of a parameter or buffer of the stage."""
        if self._storages is None:
            tensors: list[torch.Tensor] = [leaf for _, leaf in self._leaves.values()]
            for layer in self.layers.values():
                tensors += layer.buffers().values()
            self._storages = set().union(*(storage_addresses(tensor) for tensor in tensors))
        return address in self._storages

    def issue(self, wanted_bytes: int) -> None:
        """Enqueue about so many bytes of the upload."""
        begin, before_bytes = self.device.moment(Stream.WEIGHTS), self._upload.remaining_bytes
        self._upload.issue(wanted_bytes)
        issued_bytes = before_bytes - self._upload.remaining_bytes
        if issued_bytes:
            end = self.device.moment(Stream.WEIGHTS)
            self.transfers.append(Transfer("upload", issued_bytes, begin, end))

    def arrive(self) -> None:
        """Enqueue the rest; compute enqueued from now on finds the weights in place."""
        device = self.device
        self.issue(max(1, self.remaining_bytes))
        there = self._upload.finish()
        # Compute must not start before the last weight is there.
        device.wait(Stream.COMPUTE, there)
        if not device.shares_host_memory:
            self._reads_issued(there)
        for leaf, content in self._seeds:
            with device.compute_scope(), torch.no_grad():
                wanted = self._accumulate_dtype or leaf.dtype
                leaf.grad = content.to(wanted) if leaf.is_floating_point() else content
            if leaf.grad is not content and not device.shares_host_memory:
                # Dropped here, its memory could be given to the next upload while it is converted.
                device.mark_use(content, Stream.COMPUTE)
        self._seeds.clear()

    def _reads_issued(self, over: Event | None) -> None:
        while self._pending_reads:
            self._store.read_issued(self._pending_reads.pop(), over)

    def account_gradients(self) -> None:
        """Tell the device's ledger which tensors are gradients.

        Raises:
            InvalidTypeError: a sparse one, on a device from which it cannot be brought home.
        """
        for record, leaf in self._leaves.values():
            if leaf.grad is not None:
                if leaf.grad.layout is not torch.strided and not self.device.shares_host_memory:
                    raise InvalidTypeError(
                        f"the gradient of {record.name} is sparse, which only CPU devices support; "
                        "make its layer with sparse=False"
                    )
                self.device.account(leaf.grad, Category.GRADIENTS)

    def send_gradients(self, who: str, scope: Scope | None = None) -> Sequence[Event]:
        """Start bringing the accumulated gradients home into the store's slots.

        Args:
            who: the waiter, for the log line of a wait that takes long.
            scope: the run; its failure ends the wait for a step that still uses a buffer.

        Returns:
            The events after which they are there.
        """
        events = []
        sent_bytes, device = 0, self.device
        # The copies wait for compute, too; here, so that their time does not hold the waiting.
        device.wait(Stream.OUTWARD, device.record(Stream.COMPUTE))
        begin = device.moment(Stream.OUTWARD)
        for record, leaf in self._leaves.values():
            # The leaf keeps it until `release`: it may have come by the weights stream, which would
            # get its memory back while compute still adds to it.
            grad = leaf.grad
            if grad is None:
                continue
            slot = self._slot(record)
            if grad.dtype != leaf.dtype:
                with self.device.compute_scope():
                    grad = grad.to(leaf.dtype)
            if not self.device.shares_host_memory:
                # A step may still be using what the buffer held before (rule 4 of the store).
                slot.wait_buffer_free(who, scope)
                if slot.buffer is None:
                    slot.buffer = self.device.host_empty(grad)
            content, ready = download(self.device, grad, slot.buffer)
            slot.put(content, ready)
            if ready is not None:
                events.append(ready)
                sent_bytes += grad.numel() * grad.element_size()
        end = device.moment(Stream.OUTWARD)
        self.transfers.append(Transfer("download", sent_bytes, begin, end))
        return events

    def release(self) -> None:
        """Give the weights' memory back. Nothing enqueued afterwards may use them."""
        device = self.device
        # The memory belongs to the weights stream: without this wait the next upload into it could
        # start while the last microbatch still computes with the old weights.
        device.wait(Stream.WEIGHTS, device.record(Stream.COMPUTE))
        self.layers.clear()
        self._buffers.clear()
        self._leaves.clear()
        self._seeds.clear()
        # Where weights are used in place they are read until here.
        self._reads_issued(None)
