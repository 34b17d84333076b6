"""Arguments of layers into expressions over named tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from roundpipe.hf import private
from roundpipe.hf.plan import (
    Arguments,
    Const,
    ContainerRef,
    ContainerSpec,
    Expr,
    Here,
    Items,
    ParameterRef,
    Tree,
    Value,
)
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.hf.stubs import is_plain
from roundpipe.hf.tokens import Token
from roundpipe.microbatch.tree import flatten

# Layers may write into these, so two arguments that are one object must stay one object.
_MUTABLE = (dict, list)


class Encoder:
    """Encodes the arguments of one pass through the prefix.

    Attributes:
        table: the tensors found, by name; one name per object.
        containers: the mutable containers found.
    """

    def __init__(
        self, model_class: str, device: torch.device, parameter_names: Mapping[int, str]
    ) -> None:
        self._model_class = model_class
        self._device = device
        self._parameter_names = parameter_names
        self.table: dict[str, torch.Tensor] = {}
        self.containers: list[ContainerSpec] = []
        self._names: dict[int, str] = {}  # by id; the table keeps the objects alive
        self._container_refs: dict[int, ContainerRef] = {}
        self._kept: list[Any] = []

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Encode the arguments of a call of a layer."""
        return Arguments(
            tuple([self.encode(arg) for arg in args]),
            {name: self.encode(arg) for name, arg in kwargs.items()},
        )

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Encode the arguments of the model; what is unknown stays as it is."""
        return Arguments(
            tuple([self._tree(arg, self._input) for arg in args]),
            {name: self._tree(arg, self._input) for name, arg in kwargs.items()},
        )

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Encode what an operation is applied to; there, parameters count by name."""
        return Arguments(
            tuple([self._tree(arg, self._operand) for arg in args]),
            {name: self._tree(arg, self._operand) for name, arg in kwargs.items()},
        )

    def encode(self, value: Any) -> Expr:
        """Encode one argument of a layer.

        Raises:
            CutRefusedError: it is of a kind that cannot travel from layer to layer.
        """
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in _MUTABLE or isinstance(value, UserDict):
            return self._container(value)
        if is_plain(value):
            return self._constant(value)
        if type(value) is tuple:
            return Items(tuple([self.encode(item) for item in value]))
        leaves, structure = flatten(value)
        if structure.is_leaf:
            return self._opaque(value)
        return Tree(structure, tuple([self.encode(leaf) for leaf in leaves]))

    def tensor(self, value: torch.Tensor) -> Value:
        """The name of a tensor; a new one gets the next place in the table."""
        if isinstance(value, Token):
            if value.token_name is None:
                raise CutRefusedError(
                    self._model_class,
                    "the output of a layer reaches a later layer through code that cannot be "
                    "followed",
                )
            return Value(value.token_name)
        name = self._names.get(id(value))
        if name is None:
            name = f"t{len(self.table)}"
            self._names[id(value)] = name
            self.table[name] = value
        return Value(name)

    def _constant(self, value: Any) -> Expr:
        return Here() if value == self._device and isinstance(value, torch.device) else Const(value)

    def _opaque(self, value: Any) -> Expr:
        if isinstance(value, (FunctionType, BuiltinFunctionType, partial)):
            return Const(value)
        what = f"a {type(value).__name__}"
        if private.is_cache(value):
            raise CutRefusedError(
                self._model_class,
                f"its layers are given a cache ({what}), which a recomputed layer would fill twice",
                "do not pass a cache; if the model makes one although use_cache=False, wrap it "
                "with use_sequential_preset=False",
            )
        raise CutRefusedError(
            self._model_class,
            f"a layer is given {what}, which is neither tensor, constant nor a known container",
        )

    def _container(self, value: Any) -> Expr:
        ref = self._container_refs.get(id(value))
        if ref is None:
            ref = ContainerRef(len(self.containers))
            self._container_refs[id(value)] = ref
            self._kept.append(value)
            contents = self._tree(plain_contents(value), self.encode)
            self.containers.append(ContainerSpec(container_factory(value), contents))
        return ref

    def _tree(self, value: Any, encode: Callable[[Any], Expr]) -> Expr:
        leaves, structure = flatten(value)
        if structure.is_leaf:
            return encode(value)
        return Tree(structure, tuple([encode(leaf) for leaf in leaves]))

    def _input(self, value: Any) -> Expr:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self._constant(value)

    def _operand(self, value: Any) -> Expr:
        name = self._parameter_names.get(id(value)) if isinstance(value, torch.Tensor) else None
        if name is not None:
            return ParameterRef(name)
        return self._input(value)


def plain_contents(container: Any) -> Any:
    """The contents of a container, as dict or list, new at the top."""
    return list(container) if isinstance(container, list) else dict(container)


def container_factory(container: Any) -> Callable[[Any], Any]:
    """Makes containers of the same class around given contents."""
    if isinstance(container, UserDict):
        attributes = {k: v for k, v in vars(container).items() if k != "data"}
        return partial(_make_user_dict, type(container), attributes)
    return list if isinstance(container, list) else dict


def _make_user_dict(cls: type[UserDict[Any, Any]], attributes: dict[str, Any], data: Any) -> Any:
    made = cls.__new__(cls)
    made.__dict__.update(attributes)
    made.data = dict(data)
    return made
