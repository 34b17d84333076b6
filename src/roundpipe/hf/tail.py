"""The last piece: final norm, head and loss, by the library's own forward."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from roundpipe.grafting import Graft
from roundpipe.hf import private
from roundpipe.hf.batch_loss import LossRule, loss_options, weigh_balance
from roundpipe.hf.blueprint import Blueprint, LeafSpec, call_value, collected_value
from roundpipe.hf.lazy_logits import LAZY_FROM_BYTES
from roundpipe.hf.plan import Scope, State
from roundpipe.hf.skeleton import SkeletonPiece
from roundpipe.hf.stubs import activate
from roundpipe.hf.tokens import blank


class TailPiece(SkeletonPiece):
    """Runs the model on the arguments of the call once more, without its layers.

    The forward goes through the whole of the library's code; layers and the modules that the
    prefix has run return what is in the state, or, where only a shape is looked at, blanks.

    Attributes:
        loss_rule: what the model's own loss is made of, if that is known.
        lazy_from_bytes: logits from this size on (in 32 bits) are left out where the call has no
            use for them.
    """

    def __init__(self, skeleton: Graft, blueprint: Blueprint, loss_rule: LossRule | None) -> None:
        super().__init__(skeleton)
        self.blueprint = blueprint
        self.loss_rule = loss_rule
        self.lazy_from_bytes = LAZY_FROM_BYTES

    def forward(self, state: State) -> Any:
        """Return the model's output for one microbatch."""
        device = next(iter(state.tensors.values())).device
        run = TailRun(self.blueprint, state, device)
        args, kwargs = state.plan.inputs.build(run.scope)
        options = state.plan.options
        with activate(run), loss_options(options, self.lazy_from_bytes):
            output = self.skeleton(*args, **kwargs)
        weigh_balance(self.loss_rule, options, kwargs, output)
        return output


class TailRun:
    """One pass of the library's forward over the results of the layers."""

    def __init__(self, blueprint: Blueprint, state: State, device: torch.device) -> None:
        self.model_class = blueprint.model_class
        self.device = device
        self.scope = Scope(state.tensors, {}, {}, device)
        self._blueprint = blueprint
        self._state = state
        self._calls = 0
        self._held: dict[str, int] = defaultdict(int)

    def call(self, element: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a layer as far as the tail reads it."""
        index = self._calls
        spec = self._blueprint.expected_call(index, element)
        self._calls += 1
        self._collect(index)
        tensors = self._state.tensors

        def tensor(leaf: int, leaf_spec: LeafSpec, arguments: list[Any]) -> torch.Tensor:
            real = tensors.get(call_value(index, leaf))
            if real is not None:
                return real
            assert leaf_spec.dtype is not None
            return blank(leaf_spec.shape(arguments), leaf_spec.dtype, self.device)

        return spec.output.make(args, kwargs, tensor)

    def held(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Return what the prefix noted for this call of a module, if it was made there."""
        noted = self._state.plan.held.get(name, ())
        number = self._held[name]
        self._held[name] += 1
        if number >= len(noted):
            return False, None
        return True, noted[number].build(self.scope)

    def note_held(self, name: str, output: Any) -> None:
        """Never called: the tail has no watched modules."""

    def position(self) -> str:
        """How many layers were passed."""
        return f"after {self._calls} of {len(self._blueprint.calls)} calls of layers"

    def changes_in_place(self, name: str) -> None:
        """Never called: the tail has no tokens."""

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Never called: the tail has no tokens."""

    def value_read(self, name: str, args: Any) -> None:
        """Never called: the tail has no tokens."""

    def _collect(self, call: int) -> None:
        """Give the library's collector what was caught inside the real layer."""
        collector = private.active_collector()
        for key in collector:
            index = 0
            while (name := collected_value(call, key, index)) in self._state.tensors:
                collector[key].append(self._state.tensors[name])
                index += 1
