"""Forward, recompute and backward of one stage on one microbatch.

    forward    state ─▶ layer ─▶ cut ─▶ layer ─▶ cut ─▶ state     one layer's graph at a time
    fused      state ─▶ layer ─▶ layer ─▶ loss ─▶ backward        one graph
    backward   saved state ─▶ layer ─▶ layer ─▶ backward          recompute, one graph

Forward runs with gradients enabled when a backward follows, and throws each layer's graph away. So
layers see the same modes, take the same kernels and mark the same outputs as requiring grad as in a
plain loop, and the recomputed numbers are the first forward's, bitwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import BufferHistory, Call, Chain, Phase, StageTask
from .devices.base import Category, Device
from .errors import InvalidTypeError, InvalidValueError, StateError
from .microbatch.tree import flatten, unflatten
from .random_state import LayerRandomness, layer_seed
from .stage_weights import BufferName, LayerOnDevice, StageWeights
from .transfer import Border, Origin, Value

BufferSignature = dict[BufferName, tuple[torch.Tensor, int]]


class _Cut(torch.autograd.Function):
    """Identity from leaves to tensors that a layer may overwrite in place.

    In a plain loop a layer's input is another layer's output, which in-place operations may change.
    A leaf that requires grad refuses them; the outputs of this function do not.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # `.data` shares the memory but neither version counter nor view relation with the leaf.
        return tuple(leaf.data for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads


@dataclass
class Place:
    """Where a worker is right now, for the note on a failure."""

    phase: str | None = None
    layer: int | None = None
    microbatch: int | None = None
    origin: Origin | None = None  # of a value that failed on its way home


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@dataclass
class _Given:
    """A tensor that a layer was given.

    Attributes:
        tensor: the tensor.
        raw: the fetched copy below it, without autograd.
        value: the value it is a copy of; None while it has not left the stage.
        version: its version counter when it was given.
    """

    tensor: torch.Tensor
    raw: torch.Tensor
    value: Value | None
    version: int

    @property
    def untouched(self) -> bool:
        """Whether nobody overwrote it."""
        return _version(self.tensor) == self.version


@dataclass
class _State:
    """What a layer is called with.

    Attributes:
        tree: the argument, or for layer 0 ``(args, kwargs)``.
        given: the tensors in it, by identity.
        leaves: leaves below the tensors that receive gradients, with their values.
        made: outputs of the layer that became values already.
    """

    tree: Any
    given: dict[int, _Given] = field(default_factory=dict)
    leaves: list[tuple[torch.Tensor, Value]] = field(default_factory=list)
    made: dict[int, tuple[torch.Tensor, Value]] = field(default_factory=dict)

    def origin(self, tensor: torch.Tensor) -> _Given | None:
        """The given tensor that ``tensor`` is, unchanged; None if it is something new."""
        found = self.given.get(id(tensor))
        return found if found is not None and found.untouched else None


class StageCompute:
    """Runs the microbatches of one stage task. Used by the device's worker only."""

    def __init__(
        self,
        call: Call,
        task: StageTask,
        device: Device,
        weights: StageWeights,
        randomness: LayerRandomness,
        place: Place,
        keep: Callable[[Value], None],
        check: Callable[[], None],
    ) -> None:
        self._call = call
        self._task = task
        self._device = device
        self._weights = weights
        self._randomness = randomness
        self._place = place
        self._keep = keep  # told of every value of which a copy stays on the device
        self._check = check  # raises if the run is over: between layers is where it can end
        self._signatures: dict[int, BufferSignature] = {}

    def run(self, chain: Chain) -> None:
        """Everything the task does with one microbatch."""
        self._place.microbatch = chain.index
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
            state = self._enter(chain.borders[layers[0]])
            for index in layers:
                output = self._run_watched(index, chain, state)
                saved = index + 1 in call.saved
                if index == last or saved:
                    chain.borders[index + 1] = self._leave(
                        output, state, chain, saved, index == last
                    )
                if index != last:
                    state = self._cut(output, state)
                del output
        if layers[0] not in call.saved:
            chain.borders.pop(layers[0])

    def _fused(self, chain: Chain) -> None:
        self._place.phase = "forward"
        layers = self._task.layers
        with self._call.context.enter(True):
            state = self._enter(chain.borders[layers[0]])
            output: Any = None
            for index in layers:
                output = self._run_watched(index, chain, state)
                state.tree = output
            if self._call.return_outputs:
                chain.output = self._leave(output, _State(None), chain, True, True)
            losses = self._losses(chain, output)
        del output, state.tree
        self._place.phase = "backward"
        torch.autograd.backward(losses)
        del losses
        self._hand_back(state, chain, layers[0])

    def _losses(self, chain: Chain, output: Any) -> list[torch.Tensor]:
        self._place.phase, self._place.layer = "loss", None
        leaves = [
            self._fetch(leaf) if isinstance(leaf, Value) else leaf for leaf in chain.label.leaves
        ]
        label = unflatten(chain.label.structure, leaves)
        if self._call.loss_fn is None:
            raise RuntimeError("a fused call without a loss function")
        result = self._call.loss_fn(output, label)
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
                state = self._enter(chain.borders[layers[0]])
                for index in layers:
                    self._rewind_buffers(index, chain)
                    state.tree = self._run_layer(index, chain, state)
            roots, grads = self._roots(border, state)
            del state.tree
            self._place.phase = "backward"
            torch.autograd.backward(roots, grads)
            del roots, grads
            self._hand_back(state, chain, layers[0])
        if not self._call.keeps_borders:
            chain.borders.pop(layers[-1] + 1)

    def _roots(
        self, border: Border, state: _State
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
            grads.append(self._fetch(value.grad, read_only=True))
            value.grad = None
        return roots, grads

    def _hand_back(self, state: _State, chain: Chain, first: int) -> None:
        """Gradients of the inputs of layer ``first`` go to the stage in front, or home."""
        inside = first != self._task.layers[0]
        here = inside or self._task.next_device(chain.index) == self._device.index
        for leaf, value in state.leaves:
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                value.grad = Value()
                self._send_on(value.grad, grad, False, here)
        self._keep_for_below(state, chain, first)

    def _keep_for_below(self, state: _State, chain: Chain, first: int) -> None:
        """Copies of what earlier layers were given, too, stay for their backward."""
        below = max((border for border in chain.borders if border < first), default=None)
        if below is None:
            return
        wanted = {id(value) for value in chain.borders[below].values()}
        for given in state.given.values():
            if given.value is not None and id(given.value) in wanted and given.untouched:
                self._keep_copy(given.value, given.raw)

    # --- one layer ---------------------------------------------------------------------------

    def _run_watched(self, index: int, chain: Chain, state: _State) -> Any:
        """A layer's first forward on the microbatch, which may change its buffers."""
        layer = self._weights.layers[index]
        if not layer.owners:
            return self._run_layer(index, chain, state)
        before = self._signatures.get(index) or _signature(layer)
        output = self._run_layer(index, chain, state)
        now = self._signatures[index] = _signature(layer)
        self._note_buffers(index, chain, changed=not _same(before, now))
        return output

    def _run_layer(self, index: int, chain: Chain, state: _State) -> Any:
        self._check()
        self._place.layer = index
        layer = self._weights.layers[index].module
        if index == 0:
            args, kwargs = state.tree
        else:
            args, kwargs = (state.tree,), {}
        call = self._call
        if not call.config.preserve_rng_state:
            output = layer(*args, **kwargs)
        else:
            seed = layer_seed(call.seed, chain.index, index)
            key = (index, layer.training, torch.is_grad_enabled())
            # Between seeding and drawing, another logical device of the same accelerator would take
            # this layer's numbers.
            with self._device.random_lock or contextlib.nullcontext():
                self._device.seed(seed)
                output = self._randomness.run(key, seed, lambda: layer(*args, **kwargs))
        if self._task.phase is not Phase.FORWARD:
            self._mark(index, output)
        return output

    def _mark(self, index: int, output: Any) -> None:
        """When backward reaches the layer's output, the worker is in that layer."""
        leaves = [output] if isinstance(output, torch.Tensor) else flatten(output)[0]
        marked = next((x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if marked is None:
            return

        def arrive(_grad: torch.Tensor) -> None:
            self._check()
            self._place.layer = index

        marked.register_hook(arrive)

    # --- state in and out --------------------------------------------------------------------

    def _fetch(self, value: Value, read_only: bool = False) -> torch.Tensor:
        """The value on the device; a failure is that of its upload, or of its way home before."""
        try:
            return value.fetch(self._device, read_only)
        except BaseException:
            place = self._place
            place.phase, place.layer = "upload", None
            if value.failed_on_the_way_home():
                place.phase, place.origin = "download", value.origin
            raise

    def _enter(self, border: Border) -> _State:
        """The state on the device, with leaves for what requires grad."""
        raw = {id(value): self._fetch(value) for value in border.values()}
        tensors = dict(raw)
        state = _State(None)
        if torch.is_grad_enabled():
            for value in border.values():
                if value.requires_grad:
                    state.leaves.append((raw[id(value)].detach().requires_grad_(), value))
            if state.leaves:
                cut = _Cut.apply(*(leaf for leaf, _ in state.leaves))
                for (_, value), tensor in zip(state.leaves, cut, strict=True):
                    tensors[id(value)] = tensor
        for value in border.values():
            tensor = tensors[id(value)]
            state.given[id(tensor)] = _Given(tensor, raw[id(value)], value, _version(tensor))
        leaves = [tensors[id(leaf)] if isinstance(leaf, Value) else leaf for leaf in border.leaves]
        state.tree = unflatten(border.structure, leaves)
        return state

    def _cut(self, output: Any, before: _State) -> _State:
        """The next layer's input inside a forward stage: the same tensors without their graph."""
        leaves, structure = flatten(output)
        state = _State(None)
        fresh: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                given = before.origin(leaf)
                if given is not None:
                    state.given[id(leaf)] = given
                    fresh[id(leaf)] = leaf
                elif id(leaf) not in fresh:
                    raw = tensor = leaf.detach()
                    if leaf.requires_grad:
                        (tensor,) = _Cut.apply(raw.detach().requires_grad_())
                    fresh[id(leaf)] = tensor
                    # Keeps its value if it was saved just now: handed on unchanged by the layers
                    # that follow, it is not sent again.
                    value = before.made[id(leaf)][1] if id(leaf) in before.made else None
                    state.given[id(tensor)] = _Given(tensor, raw, value, _version(tensor))
        state.tree = unflatten(
            structure, [fresh[id(x)] if isinstance(x, torch.Tensor) else x for x in leaves]
        )
        return state

    def _leave(
        self, output: Any, state: _State, chain: Chain, saved: bool, stage_end: bool
    ) -> Border:
        """The state behind a layer; new tensors start on their way to where they are needed."""
        leaves, structure = flatten(output)
        next_device = self._task.next_device(chain.index)
        stays = stage_end and next_device == self._device.index
        known: dict[int, Value] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            value = known.get(id(leaf))
            if value is None:
                given = state.origin(leaf)
                if given is not None and given.value is not None:
                    value = given.value
                    self._hand_on(value, given.raw, saved, stage_end, stays)
                else:
                    value = Value(requires_grad=leaf.requires_grad)
                    # The next layer of this stage may overwrite its input while it is still on its
                    # way home; behind the stage, whoever fetches the value waits for that.
                    tensor = leaf.detach() if stage_end else leaf.detach().clone()
                    self._send_on(value, tensor, saved or next_device is None, stays)
                    state.made[id(leaf)] = (leaf, value)
                known[id(leaf)] = value
            leaves[position] = value
        return Border(structure, leaves)

    def _send_on(self, value: Value, tensor: torch.Tensor, saved: bool, stays: bool) -> None:
        device = self._device
        if device.shares_host_memory:
            tensor = self._unshared(tensor)
        device.account(tensor, Category.ACTIVATIONS)
        kept = stays and not device.shares_host_memory and self._has_room(tensor)
        if saved or not kept:
            value.bring_home(device, tensor, self._task.label)
        if kept:
            value.keep(device, tensor)
            self._keep(value)

    def _hand_on(
        self, value: Value, raw: torch.Tensor, saved: bool, stage_end: bool, stays: bool
    ) -> None:
        """A value that layers only passed through: it is home already, as a rule."""
        kept = stage_end and self._keep_copy(value, raw)
        if not value.has_host and (saved or (stage_end and not (kept and stays))):
            value.bring_home(self._device, raw if stage_end else raw.clone(), self._task.label)

    def _unshared(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, copied if it lies in a parameter or buffer that later calls change."""
        if tensor.layout is not torch.strided:
            return tensor
        address = tensor.untyped_storage().data_ptr()
        return tensor.clone() if self._weights.holds_storage(address) else tensor

    def _keep_copy(self, value: Value, raw: torch.Tensor) -> bool:
        """Leave a copy on the device for later stages. Returns whether it is there."""
        device = self._device
        if not value.on(device):
            if not self._task.next_devices or not self._has_room(raw):
                return False
            value.keep(device, raw)
            self._keep(value)
        return True

    def _has_room(self, tensor: torch.Tensor) -> bool:
        return self._device.has_room(tensor.numel() * tensor.element_size())

    # --- buffers -----------------------------------------------------------------------------

    def _note_buffers(self, index: int, chain: Chain, changed: bool) -> None:
        """After a layer's forward: remember what its buffers held, if it ever changed any."""
        history = self._call.histories.get(index)
        layer = self._weights.layers[index]
        if history is None:
            if not changed:
                return
            history = self._begin_history(index, chain, layer)
        if changed:
            history.latest = self._snapshot(layer.buffers())
        history.before[chain.index + 1] = history.latest

    def _begin_history(self, index: int, chain: Chain, layer: LayerOnDevice) -> BufferHistory:
        # Until now nothing had changed: earlier microbatches, too, began with the user's buffers.
        initial = {
            key: Value(tensor.detach().clone()) for key, tensor in layer.original_buffers().items()
        }
        history = BufferHistory(dict.fromkeys(range(chain.index + 1), initial))
        self._call.histories[index] = history
        return history

    def _snapshot(self, buffers: dict[BufferName, torch.Tensor]) -> dict[BufferName, Value]:
        snapshot = {}
        for key, tensor in buffers.items():
            value = Value()
            value.bring_home(self._device, tensor.detach().clone(), self._task.label)
            snapshot[key] = value
        return snapshot

    def _rewind_buffers(self, index: int, chain: Chain) -> None:
        """Before a recompute: the buffers as the first forward of this microbatch found them."""
        history = self._call.histories.get(index)
        if history is not None:
            before = history.before[chain.index]
            tensors = {key: self._fetch(value) for key, value in before.items()}
            self._weights.layers[index].set_buffers(tensors)


def _signature(layer: LayerOnDevice) -> BufferSignature:
    # The tensors themselves, not their ids: an id may come back with another tensor.
    return {key: (tensor, _version(tensor)) for key, tensor in layer.buffers().items()}


def _same(one: BufferSignature, other: BufferSignature) -> bool:
    return one.keys() == other.keys() and all(
        tensor is other[key][0] and version == other[key][1]
        for key, (tensor, version) in one.items()
    )


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
