"""What travels from piece to piece for one microbatch.

The prefix runs the library's forward up to the last layer and records each layer's arguments as
small expressions over named tensors. A plan holds these expressions and nothing of the data; the
tensors travel beside it::

    prefix -> State -> layer 0 -> State -> ... -> layer n-1 -> State -> tail -> the model's output

Names of tensors: ``t3`` is entry 3 of the prefix's table, ``c5.0`` is leaf 0 of the output of
layer call 5, ``g2.0`` is leaf 0 of the result of operation 2 between the layers, ``r5.k.0`` is the
first tensor that call 5 collected for output ``k``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from roundpipe.microbatch.tree import Structure, unflatten


class State(NamedTuple):
    """What one piece hands to the next.

    Attributes:
        plan: the microbatch's plan; one object, shared by all pieces.
        tensors: by name, every tensor that this or a later piece reads. What a piece does not
            compute anew it hands on as the same object.
        containers: contents of those mutable containers that a layer has changed, by index.
    """

    plan: Plan
    tensors: dict[str, torch.Tensor]
    containers: dict[int, Any]


@dataclass(slots=True)
class Scope:
    """What expressions are evaluated against, in one piece.

    Attributes:
        tensors: the state's tensors.
        containers: the containers of this piece, rebuilt with their present contents.
        parameters: the piece's own copies of the parameters that operations between layers use.
        device: where the piece runs.
    """

    tensors: Mapping[str, torch.Tensor]
    containers: Mapping[int, Any]
    parameters: Mapping[str, torch.Tensor]
    device: torch.device


class Expr:
    """An argument, encoded."""

    __slots__ = ()

    def build(self, scope: Scope) -> Any:
        """The argument for this piece."""
        raise NotImplementedError

    def reads(self) -> Iterable[str]:
        """Names of the tensors it needs."""
        return ()

    def container_indices(self) -> Iterable[int]:
        """Indices of the containers it needs."""
        return ()

    def parameters(self) -> Iterable[str]:
        """Names of the parameters it needs."""
        return ()


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A value that is the same on every device."""

    value: Any

    def build(self, scope: Scope) -> Any:
        """The value itself."""
        return self.value


@dataclass(frozen=True, slots=True)
class Here(Expr):
    """The device of the piece; the prefix saw its own."""

    def build(self, scope: Scope) -> torch.device:
        """The device on which this piece runs."""
        return scope.device


@dataclass(frozen=True, slots=True)
class Blank(Expr):
    """A tensor of which only shape and dtype matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def build(self, scope: Scope) -> torch.Tensor:
        """Zeros on this piece's device; the library may write into them."""
        return torch.zeros(self.shape, dtype=self.dtype, device=scope.device)


@dataclass(frozen=True, slots=True)
class Value(Expr):
    """A named tensor."""

    name: str

    def build(self, scope: Scope) -> torch.Tensor:
        """The tensor, on this piece's device."""
        return scope.tensors[self.name]

    def reads(self) -> Iterable[str]:
        """Its name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class ParameterRef(Expr):
    """A parameter, by its name in the model."""

    name: str

    def build(self, scope: Scope) -> torch.Tensor:
        """The piece's own copy."""
        return scope.parameters[self.name]

    def parameters(self) -> Iterable[str]:
        """Its name."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class ContainerRef(Expr):
    """A mutable container that layers share; the same object for all uses within a piece."""

    index: int

    def build(self, scope: Scope) -> Any:
        """The container, with its present contents."""
        return scope.containers[self.index]

    def container_indices(self) -> Iterable[int]:
        """Its index."""
        return (self.index,)


class Items(Expr):
    """A tuple of expressions."""

    __slots__ = ("leaves",)

    def __init__(self, leaves: tuple[Expr, ...]) -> None:
        self.leaves = leaves

    def build(self, scope: Scope) -> Any:
        """A new tuple."""
        return tuple([leaf.build(scope) for leaf in self.leaves])

    def reads(self) -> Iterable[str]:
        """Names in all leaves."""
        return (name for leaf in self.leaves for name in leaf.reads())

    def container_indices(self) -> Iterable[int]:
        """Indices in all leaves."""
        return (index for leaf in self.leaves for index in leaf.container_indices())

    def parameters(self) -> Iterable[str]:
        """Names in all leaves."""
        return (name for leaf in self.leaves for name in leaf.parameters())


class Tree(Items):
    """Any nested structure of expressions."""

    __slots__ = ("structure",)

    def __init__(self, structure: Structure, leaves: tuple[Expr, ...]) -> None:
        super().__init__(leaves)
        self.structure = structure

    def build(self, scope: Scope) -> Any:
        """A new structure."""
        return unflatten(self.structure, [leaf.build(scope) for leaf in self.leaves])


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a call, with the library's own split into positional and keyword."""

    args: tuple[Expr, ...]
    kwargs: Mapping[str, Expr]

    def build(self, scope: Scope) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for this piece."""
        args = tuple([arg.build(scope) for arg in self.args])
        return args, {name: arg.build(scope) for name, arg in self.kwargs.items()}

    def exprs(self) -> Iterable[Expr]:
        """All of them."""
        yield from self.args
        yield from self.kwargs.values()


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that the library's code does between two layers.

    Attributes:
        func: the torch function.
        arguments: what it is applied to.
        results: a name for each leaf of the result, ``None`` for what is no tensor.
        grad: whether the library ran it with gradients.
    """

    func: Callable[..., Any]
    arguments: Arguments
    results: tuple[str | None, ...]
    grad: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer.

    Attributes:
        arguments: its arguments.
        grad: whether the library called it with gradients.
        collect: output names for which the library collects tensors inside the layer.
        operations: operations whose inputs are complete once this call is done, in order.
        drops: names of tensors that nothing reads after this call and its operations.
        drops_containers: the same for containers.
    """

    arguments: Arguments
    grad: bool
    collect: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    drops: frozenset[str] = frozenset()
    drops_containers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A mutable container as the prefix saw it.

    Attributes:
        factory: makes an equal container around given contents.
        contents: the contents before the first layer.
    """

    factory: Callable[[Any], Any]
    contents: Expr


class TailOptions:
    """What the tail must know about the call; travels as one argument beside the model's own.

    A plain class, like :class:`Plan`, so that it is one leaf of the arguments.

    Attributes:
        lazy_logits: whether only the loss needs the logits.
        items: what to divide the loss by instead of the microbatch's number of labels.
        tokens: tokens of the whole batch, where the weight of a microbatch is asked for.
        elements: the same as ``items`` for losses that are means over all numbers in the labels.
    """

    __slots__ = ("elements", "items", "lazy_logits", "tokens")

    def __init__(
        self,
        lazy_logits: bool = False,
        items: float | None = None,
        tokens: float | None = None,
        elements: float | None = None,
    ) -> None:
        self.lazy_logits = lazy_logits
        self.items = items
        self.tokens = tokens
        self.elements = elements

    def __deepcopy__(self, memo: dict[int, Any]) -> TailOptions:
        return self  # nothing in it changes


# Under this name the options stand among the keyword arguments of the first piece.
TAIL_OPTIONS = "roundpipe_tail_options"


class Plan:
    """All that the pieces need to know about one microbatch, without its tensors.

    A plain class and no dataclass: to the engine it must be one leaf of the state.

    Attributes:
        calls: the layers' calls, in order.
        containers: mutable containers among the arguments.
        inputs: the arguments of the model.
        held: for each held module, what each of its outputs looked like.
        alive: names of all tensors that some piece reads.
        options: what the tail must know about the call.
    """

    __slots__ = ("alive", "calls", "containers", "held", "inputs", "options")

    def __init__(
        self,
        calls: tuple[Call, ...],
        containers: tuple[ContainerSpec, ...],
        inputs: Arguments,
        held: Mapping[str, tuple[Expr, ...]],
        alive: frozenset[str],
        options: TailOptions,
    ) -> None:
        self.calls = calls
        self.containers = containers
        self.inputs = inputs
        self.held = held
        self.alive = alive
        self.options = options

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # nothing in it changes
