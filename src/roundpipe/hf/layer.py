"""The pieces in the middle: one call of one layer each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.hf import private
from roundpipe.hf.blueprint import Blueprint, call_value, collected_value
from roundpipe.hf.encode import plain_contents
from roundpipe.hf.plan import Call, Operation, Scope, State
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.microbatch.tree import flatten


class ParameterTable(nn.Module):
    """Parameters of the model, by their names there, that a piece needs besides its layer's."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = tuple(parameters)
        for index, parameter in enumerate(parameters.values()):
            self.register_parameter(f"p{index}", parameter)

    def as_mapping(self) -> dict[str, nn.Parameter]:
        """The parameters of this copy of the piece."""
        return {name: self.get_parameter(f"p{index}") for index, name in enumerate(self.names)}


class LayerPiece(nn.Module):
    """Runs one call of one layer, then the operations that follow it."""

    def __init__(
        self,
        index: int,
        layer: nn.Module,
        blueprint: Blueprint,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self.index = index
        self.layer = layer
        self.blueprint = blueprint
        self.between = ParameterTable(parameters)

    def forward(self, state: State) -> State:
        """Run the layer on one microbatch."""
        return self.advance(state, _without_checkpointing(self.layer))

    def advance(self, state: State, layer: Callable[..., Any]) -> State:
        """The step from one state to the next, with ``layer`` called for the output."""
        plan = state.plan
        call = plan.calls[self.index]
        tensors = dict(state.tensors)
        scope = self._scope(state, call, tensors)
        args, kwargs = call.arguments.build(scope)
        with private.collecting(call.collect) as caught, _grad_as(call.grad):
            output = layer(*args, **kwargs)
        self._keep_output(plan.alive, tensors, output)
        self._keep_caught(tensors, caught)
        for operation in call.operations:
            self._operate(operation, scope, tensors)
        for name in call.drops:
            tensors.pop(name, None)
        return State(plan, tensors, self._contents(state, call, scope))

    def _scope(self, state: State, call: Call, tensors: dict[str, torch.Tensor]) -> Scope:
        device = next(iter(tensors.values())).device
        scope = Scope(tensors, {}, self.between.as_mapping(), device)
        containers = {}
        for expr in call.arguments.exprs():
            for index in expr.container_indices():
                if index not in containers:
                    spec = state.plan.containers[index]
                    changed = state.containers.get(index)
                    contents = spec.contents.build(scope) if changed is None else changed
                    containers[index] = spec.factory(plain_contents(contents))
        scope.containers = containers
        return scope

    def _keep_output(
        self, alive: frozenset[str], tensors: dict[str, torch.Tensor], output: Any
    ) -> None:
        spec = self.blueprint.calls[self.index].output
        leaves, structure = flatten(output)
        if structure != spec.structure:
            self._refuse(
                f"returned {structure.describe()}, which was {spec.structure.describe()} when the "
                "model was cut"
            )
        for leaf, (value, leaf_spec) in enumerate(zip(leaves, spec.leaves, strict=True)):
            name = call_value(self.index, leaf)
            if isinstance(value, torch.Tensor) != (leaf_spec.dtype is not None):
                self._refuse(f"returned a {type(value).__name__} as output {leaf}")
            if name in alive:
                tensors[name] = value

    def _keep_caught(
        self, tensors: dict[str, torch.Tensor], caught: Mapping[str, list[torch.Tensor]]
    ) -> None:
        for key, values in caught.items():
            for index, value in enumerate(values):
                if not isinstance(value, torch.Tensor):
                    self._refuse(f"gave a {type(value).__name__} for the output {key}")
                tensors[collected_value(self.index, key, index)] = value

    def _operate(
        self, operation: Operation, scope: Scope, tensors: dict[str, torch.Tensor]
    ) -> None:
        args, kwargs = operation.arguments.build(scope)
        with _grad_as(operation.grad):
            result = operation.func(*args, **kwargs)
        for name, value in zip(operation.results, flatten(result)[0], strict=True):
            if name is not None:
                tensors[name] = value

    def _contents(self, state: State, call: Call, scope: Scope) -> dict[int, Any]:
        """Contents of the containers that some layer has changed."""
        contents = dict(state.containers)
        for index, container in scope.containers.items():
            now = plain_contents(container)
            if index in contents or not _same_objects(
                now, state.plan.containers[index].contents.build(scope)
            ):
                contents[index] = now
        return {i: c for i, c in contents.items() if i not in call.drops_containers}

    def _refuse(self, reason: str) -> NoReturn:
        name = self.blueprint.elements[self.blueprint.calls[self.index].element]
        raise CutRefusedError(self.blueprint.model_class, f"{name} {reason}")


def _same_objects(a: Any, b: Any) -> bool:
    leaves, structure = flatten(a)
    others, other_structure = flatten(b)
    return structure == other_structure and all(
        x is y or (not isinstance(x, torch.Tensor) and x == y)
        for x, y in zip(leaves, others, strict=True)
    )


def _grad_as(grad: bool) -> AbstractContextManager[object]:
    return nullcontext() if grad else torch.no_grad()


def _without_checkpointing(layer: nn.Module) -> nn.Module:
    """The layer, or a shallow copy that does not recompute itself inside the engine's recompute."""
    if not getattr(layer, "gradient_checkpointing", False):
        return layer
    plain = copy.copy(layer)
    plain.__dict__["gradient_checkpointing"] = False
    return plain
