"""A microbatch's state inside a stage: the tensors a layer is given, and those it leaves.

    Border ──enter──▶ State ──layer──▶ output ──cut──▶ State ──layer──▶ output ──leave──▶ Border

A border's values lie wherever they lie; a state's tensors are on the stage's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import Call, Chain, StageTask
from .compat import storage_addresses
from .costs import RunNotes
from .devices.base import Category, Device
from .habits import LayerHabits
from .microbatch.tree import flatten, unflatten
from .random_state import LayerRandomness
from .stage_weights import StageWeights
from .transfer import Border, Origin, Value


class _Cut(torch.autograd.Function):
    """Identity from leaves to tensors that a layer may overwrite in place.

    In a plain loop a layer's input is another layer's output, which in-place operations may change.
    A leaf that requires grad refuses them; the outputs of this function do not.

    The gradients that arrive are put into ``sink``, by position. Accumulated in the leaves they
    would get the leaves' strides, and operators that sum in another order for other strides would
    differ from a plain loop in the last bit.
    """

    @staticmethod
    def forward(
        ctx: Any, sink: list[torch.Tensor | None], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sink = sink
        # `.data` shares the memory but neither version counter nor view relation with the leaf.
        return tuple(leaf.data for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.sink[:] = grads
        return (None,) * (len(grads) + 1)


@dataclass
class Place:
    """Where a worker is right now, for the note on a failure."""

    phase: str | None = None
    layer: int | None = None
    microbatch: int | None = None
    origin: Origin | None = None  # of a value that failed on its way home


@dataclass(frozen=True)
class StageRun:
    """One stage task on its device, as everything that takes part in running it sees it.

    Attributes:
        call: the call.
        task: the task.
        device: its device.
        weights: its layers, on the device.
        place: where the worker is, for the note on a failure.
        notes: what is measured on the way.
        randomness: which layers draw random numbers.
        habits: what watching the layers has taught.
        keep: told of every value of which a copy stays on the device.
        check: raises if the run is over: between layers is where it can end.
    """

    call: Call
    task: StageTask
    device: Device
    weights: StageWeights
    place: Place
    notes: RunNotes
    randomness: LayerRandomness
    habits: LayerHabits
    keep: Callable[[Value], None]
    check: Callable[[], None]


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass
class Given:
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
        return version_of(self.tensor) == self.version


@dataclass
class State:
    """What a layer is called with.

    Attributes:
        tree: the argument, or for layer 0 ``(args, kwargs)``.
        given: the tensors in it, by identity.
        leaves: leaves below the tensors that receive gradients.
        wanting: values of the tensors that receive gradients.
        gradients: the gradients, once backward is through.
        made: outputs of the layer that became values already.
    """

    tree: Any
    given: dict[int, Given] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)
    wanting: list[Value] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    made: dict[int, tuple[torch.Tensor, Value]] = field(default_factory=dict)

    def origin(self, tensor: torch.Tensor) -> Given | None:
        """The given tensor that ``tensor`` is, unchanged; None if it is something new."""
        found = self.given.get(id(tensor))
        return found if found is not None and found.untouched else None


class StateGate:
    """Lets microbatches' states into one stage task and out of it. Used by the worker only."""

    def __init__(self, run: StageRun) -> None:
        self._task = run.task
        self._device = run.device
        self._weights = run.weights  # which outputs must not share memory with
        self._place = run.place
        self._keep = run.keep

    def fetch(self, value: Value, read_only: bool = False) -> torch.Tensor:
        """The value on the device; a failure is that of its upload, or of its way home before."""
        try:
            return value.fetch(self._device, read_only)
        except BaseException:
            place = self._place
            place.phase, place.layer = "upload", None
            if value.failed_on_the_way_home():
                place.phase, place.origin = "download", value.origin
            raise

    def enter(self, border: Border) -> State:
        """The state on the device, with leaves for what requires grad."""
        raw = {id(value): self.fetch(value) for value in border.values()}
        tensors = dict(raw)
        state = State(None)
        if torch.is_grad_enabled():
            state.wanting = [value for value in border.values() if value.requires_grad]
            if state.wanting:
                state.leaves = [raw[id(v)].detach().requires_grad_() for v in state.wanting]
                cut = _Cut.apply(state.gradients, *state.leaves)
                tensors.update(
                    (id(v), tensor) for v, tensor in zip(state.wanting, cut, strict=True)
                )
        for value in border.values():
            tensor = tensors[id(value)]
            state.given[id(tensor)] = Given(tensor, raw[id(value)], value, version_of(tensor))
        state.tree = unflatten(
            border.structure,
            [tensors[id(leaf)] if isinstance(leaf, Value) else leaf for leaf in border.leaves],
        )
        return state

    def cut(self, output: Any, before: State) -> State:
        """The next layer's input inside a forward stage: the same tensors without their graph."""
        leaves, structure = flatten(output)
        state = State(None)
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
                        (tensor,) = _Cut.apply([], raw.detach().requires_grad_())
                    fresh[id(leaf)] = tensor
                    # Keeps its value if it was saved just now: handed on unchanged by the layers
                    # that follow, it is not sent again.
                    value = before.made[id(leaf)][1] if id(leaf) in before.made else None
                    state.given[id(tensor)] = Given(tensor, raw, value, version_of(tensor))
        state.tree = unflatten(
            structure, [fresh[id(x)] if isinstance(x, torch.Tensor) else x for x in leaves]
        )
        return state

    def leave(
        self, output: Any, state: State, chain: Chain, saved: bool, stage_end: bool
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
                    self.send_on(value, tensor, saved or next_device is None, stays)
                    state.made[id(leaf)] = (leaf, value)
                known[id(leaf)] = value
            leaves[position] = value
        return Border(structure, leaves)

    def send_on(self, value: Value, tensor: torch.Tensor, saved: bool, stays: bool) -> None:
        """Start a new tensor on its way: home, or kept here for the next stage.

        Args:
            value: what it becomes.
            tensor: the tensor, without its graph.
            saved: whether a host copy is wanted in any case.
            stays: whether the next stage runs on this device.
        """
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

    def keep_data(self, data: tuple[Any, ...]) -> Border:
        """What a layer saves for its recompute, on its way home, as it is now."""
        leaves, structure = flatten(data)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[position] = value = Value()
                copy = leaf.detach().clone()
                self._device.account(copy, Category.ACTIVATIONS)
                value.bring_home(self._device, copy, self._task.label)
        return Border(structure, leaves)

    def load_data(self, border: Border) -> tuple[Any, ...]:
        """The same on this task's device."""
        leaves = [self.fetch(x) if isinstance(x, Value) else x for x in border.leaves]
        data: tuple[Any, ...] = unflatten(border.structure, leaves)
        return data

    def _hand_on(
        self, value: Value, raw: torch.Tensor, saved: bool, stage_end: bool, stays: bool
    ) -> None:
        """A value that layers only passed through: it is home already, as a rule."""
        kept = stage_end and self._keep_copy(value, raw)
        if not value.has_host and (saved or (stage_end and not (kept and stays))):
            value.bring_home(self._device, raw if stage_end else raw.clone(), self._task.label)

    def _unshared(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, copied if it lies in a parameter or buffer that later calls change."""
        held = any(self._weights.holds_storage(address) for address in storage_addresses(tensor))
        return tensor.clone() if held else tensor

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

    def keep_for_below(self, state: State, chain: Chain, first: int) -> None:
        """Copies of what earlier layers were given, too, stay for their backward."""
        below = max((border for border in chain.borders if border < first), default=None)
        if below is None:
            return
        wanted = {id(value) for value in chain.borders[below].values()}
        for given in state.given.values():
            if given.value is not None and id(given.value) in wanted and given.untouched:
                self._keep_copy(given.value, given.raw)
