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
from roundpipe.hf.plan import Call, Operation, Plan, Scope, State
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.microbatch.tree import flatten, unflatten


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
        contents = self._container_contents(state, call, tensors)
        scope = self._scope(state.plan, contents, tensors)
        args, kwargs = call.arguments.build(scope)
        with private.collecting(call.collect) as caught, _grad_as(call.grad):
            output = layer(*args, **kwargs)
        self._keep_output(plan.alive, tensors, output)
        self._keep_caught(tensors, caught)
        for operation in call.operations:
            self._operate(operation, scope, tensors)
        for name in call.drops:
            tensors.pop(name, None)
        return State(plan, tensors, _changed_contents(state, call, contents, scope))

    def _container_contents(
        self, state: State, call: Call, tensors: dict[str, torch.Tensor]
    ) -> dict[int, Any]:
        """Present contents of the containers that the layer is given."""
        indices = {i for expr in call.arguments.exprs() for i in expr.container_indices()}
        if not indices:
            return {}
        scope = self._scope(state.plan, {}, tensors)
        return {
            index: state.containers[index]
            if index in state.containers
            else state.plan.containers[index].contents.build(scope)
            for index in sorted(indices)
        }

    def _scope(
        self, plan: Plan, contents: Mapping[int, Any], tensors: dict[str, torch.Tensor]
    ) -> Scope:
        device = next(iter(tensors.values())).device
        # The layer writes into new containers: the state stays as it is, for the recompute.
        containers = {
            index: plan.containers[index].factory(_rebuilt(content))
            for index, content in contents.items()
        }
        return Scope(tensors, containers, self.between.as_mapping(), device)

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

    def _refuse(self, reason: str) -> NoReturn:
        name = self.blueprint.elements[self.blueprint.calls[self.index].element]
        raise CutRefusedError(self.blueprint.model_class, f"{name} {reason}")


def _changed_contents(
    state: State, call: Call, contents: Mapping[int, Any], scope: Scope
) -> dict[int, Any]:
    """Contents of the containers that this or an earlier layer has changed."""
    changed = dict(state.containers)
    for index, container in scope.containers.items():
        now = plain_contents(container)
        if not _same_objects(now, contents[index]):
            changed[index] = now
    return {index: now for index, now in changed.items() if index not in call.drops_containers}


def _rebuilt(contents: Any) -> Any:
    leaves, structure = flatten(contents)
    return unflatten(structure, leaves)


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
