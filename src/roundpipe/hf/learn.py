"""Which values the tail reads: found by running it with recording stand-ins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from roundpipe.grafting import Graft
from roundpipe.hf import private
from roundpipe.hf.analysis import Analysis
from roundpipe.hf.batch_loss import LossWatch
from roundpipe.hf.blueprint import Blueprint, call_value
from roundpipe.hf.probe import ModuleCall, quiet_random
from roundpipe.hf.stubs import activate
from roundpipe.hf.tokens import Token, make_token, roots_of
from roundpipe.microbatch.tree import flatten, unflatten


def held_value(name: str, call: int, leaf: int) -> str:
    """Name of an output of a held module; names of calls of layers contain no colon."""
    return f"{name}:{call}:{leaf}"


class LearningRun:
    """A pass over the tail's skeleton in which all stand-ins have the real values."""

    def __init__(
        self,
        blueprint: Blueprint,
        calls: list[ModuleCall],
        held: Mapping[str, list[ModuleCall]],
        device: torch.device,
    ) -> None:
        self.model_class = blueprint.model_class
        self.device = device
        self.read: set[str] = set()
        self._blueprint = blueprint
        self._layer_calls = calls
        self._held_calls = held
        self._calls = 0
        self._held: dict[str, int] = defaultdict(int)

    def call(self, element: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer returned in the probe, as tokens."""
        index = self._calls
        self._blueprint.expected_call(index, element)
        self._calls += 1
        self._collect(index)
        return _tokens(self._layer_calls[index].output, lambda leaf: call_value(index, leaf))

    def held(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Return what the module returned in the probe, as tokens."""
        number = self._held[name]
        self._held[name] += 1
        calls = self._held_calls[name]
        if number >= len(calls):
            return False, None
        return True, _tokens(calls[number].output, lambda leaf: held_value(name, number, leaf))

    def note_held(self, name: str, output: Any) -> None:
        """Never called: the tail has no watched modules."""

    def position(self) -> str:
        """How many layers were passed."""
        return f"after {self._calls} of {len(self._blueprint.calls)} calls of layers"

    def changes_in_place(self, name: str) -> None:
        """The tokens' values are copies, so nothing else sees it."""

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follow where values go; after the last layer, every token used is one that is read."""
        roots = roots_of((args, kwargs))
        leaves, _ = flatten(result)
        tokens = [leaf for leaf in leaves if isinstance(leaf, Token)]
        for token in tokens:
            token.roots = roots
        if self._calls == len(self._blueprint.calls) or not tokens:
            self.read |= roots

    def value_read(self, name: str, args: Any) -> None:
        """Reading a value is reading, wherever it happens."""
        self.read |= roots_of(args)

    def _collect(self, call: int) -> None:
        collector = private.active_collector()
        for key in collector:
            collector[key].extend(self._layer_calls[call].collected.get(key, ()))


def learn_tail(
    skeleton: Graft,
    blueprint: Blueprint,
    analysis: Analysis,
    held: Mapping[str, list[ModuleCall]],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
) -> tuple[Collection[str], Any, LossWatch]:
    """Run the tail on the probe's values.

    Returns:
        The names of the values that it reads, its output, and the losses that it took.
    """
    run = LearningRun(blueprint, analysis.calls, held, device)
    watch = LossWatch()
    with torch.no_grad(), quiet_random(), activate(run), watch:
        output = skeleton.root(*inputs[0], **inputs[1])
    last = len(blueprint.calls) - 1
    leaves = enumerate(blueprint.calls[last].output.leaves)
    always = {call_value(last, leaf) for leaf, spec in leaves if spec.dtype is not None}
    return run.read | roots_of(output) | always, output, watch


def _tokens(output: Any, name: Any) -> Any:
    leaves, structure = flatten(output)
    tokens = [
        make_token(leaf.clone(), name(i), frozenset((name(i),)))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for i, leaf in enumerate(leaves)
    ]
    return unflatten(structure, tokens)
