"""What is learnt about a model once, when it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.hf import private
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.hf.stubs import is_plain
from roundpipe.microbatch.tree import Structure, flatten, unflatten


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf of a layer's output.

    Attributes:
        dtype: the tensor's dtype; ``None`` if the leaf is a constant.
        like: the argument leaf that has the same shape, if there is one.
        sizes: else for each dimension its size, or (argument leaf, dimension) of the same size.
        value: the constant.
    """

    dtype: torch.dtype | None
    like: int | None = None
    sizes: tuple[int | tuple[int, int], ...] = ()
    value: Any = None

    def shape(self, arguments: list[Any]) -> tuple[int, ...]:
        """The shape, given the leaves of the arguments of the call."""
        if self.like is not None:
            return tuple(arguments[self.like].shape)
        return tuple(
            size if isinstance(size, int) else arguments[size[0]].shape[size[1]]
            for size in self.sizes
        )


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The output of one call of a layer.

    Attributes:
        structure: tensor, tuple, or whatever the layer returns.
        leaves: its leaves.
    """

    structure: Structure
    leaves: tuple[LeafSpec, ...]

    def make(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Callable[[int, LeafSpec, list[Any]], torch.Tensor],
    ) -> Any:
        """An output of this kind.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            tensor: gives the tensor for a leaf, from its index, its spec and the argument leaves.
        """
        arguments = _argument_leaves(args, kwargs)
        leaves = [
            spec.value if spec.dtype is None else tensor(index, spec, arguments)
            for index, spec in enumerate(self.leaves)
        ]
        return unflatten(self.structure, leaves)


def learn_output(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OutputSpec | None:
    """The spec of an output that a layer returned for these arguments; ``None`` if it has none."""
    leaves, structure = flatten(output)
    arguments = _argument_leaves(args, kwargs)
    specs = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            specs.append(_learn_leaf(leaf, arguments))
        elif is_plain(leaf):
            specs.append(LeafSpec(None, value=leaf))
        else:
            return None
    return OutputSpec(structure, tuple(specs))


def _learn_leaf(tensor: torch.Tensor, arguments: list[Any]) -> LeafSpec:
    inputs = [(i, a) for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
    for index, value in inputs:
        if value.shape == tensor.shape and value.dtype == tensor.dtype:
            return LeafSpec(tensor.dtype, like=index)
    by_size: dict[int, tuple[int, int]] = {}
    for index, value in inputs:
        for dim, size in enumerate(value.shape):
            by_size.setdefault(size, (index, dim))
    sizes = tuple(size if size == 1 else by_size.get(size, size) for size in tensor.shape)
    return LeafSpec(tensor.dtype, sizes=sizes)


def _argument_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    # None stays a leaf, so that the numbering does not depend on whether there is a mask.
    return flatten((args, kwargs))[0]


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One call of a layer, as seen on the example.

    Attributes:
        element: index of the layer.
        output: what it returned.
    """

    element: int
    output: OutputSpec


@dataclass(frozen=True)
class Blueprint:
    """All pieces of one model share this.

    Attributes:
        model_class: name of the model's class.
        elements: names of the layers.
        calls: calls of layers in one forward, in order.
        takes_use_cache: whether the model must be told not to keep a cache.
        tail_reads: names of outputs of calls that the tail reads.
        tail_reads_held: (module, call, leaf) of outputs of held modules that the tail reads.
        glue_parameters: by call, names of parameters that operations after it use; ``None`` while
            that is being found out.
    """

    model_class: str
    elements: tuple[str, ...]
    calls: tuple[CallSpec, ...]
    takes_use_cache: bool
    tail_reads: frozenset[str] = frozenset()
    tail_reads_held: frozenset[tuple[str, int, int]] = frozenset()
    glue_parameters: Mapping[int, tuple[str, ...]] | None = None

    def expected_call(self, index: int, element: int) -> CallSpec:
        """The spec of call ``index``, which must be of this element.

        Raises:
            CutRefusedError: the model called its layers otherwise on the example.
        """
        if index >= len(self.calls) or self.calls[index].element != element:
            seen = (
                self.elements[self.calls[index].element]
                if index < len(self.calls)
                else "the end of the layers"
            )
            raise CutRefusedError(
                self.model_class,
                f"call {index} of a layer went to {self.elements[element]}; when the model was cut "
                f"it was {seen}. Layers that are skipped at random or called through their parts "
                "cannot be cut",
                "set layerdrop to 0, or pass cut_model an example like your batches",
            )
        return self.calls[index]

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments that the skeletons get.

        Raises:
            CutRefusedError: an output is asked for that does not exist in a sequence of layers.
        """
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise CutRefusedError(
                    self.model_class,
                    f"{name}={kwargs[name]!r} asks for values of all layers at once",
                    f"leave {name} out, or call the original model",
                )
        if kwargs.get("use_cache"):
            raise CutRefusedError(
                self.model_class,
                "use_cache=True keeps keys and values between calls",
                "pass use_cache=False, or call the original model",
            )
        if kwargs.get("return_dict", True) is False:
            raise CutRefusedError(
                self.model_class,
                "return_dict=False is not supported",
                "leave return_dict out and call .to_tuple() on the output",
            )
        if "is_causal" in kwargs:
            # The library writes it into the config for the time of a forward, and pieces of several
            # microbatches run at a time over one config.
            raise CutRefusedError(
                self.model_class,
                "is_causal is not supported as an argument",
                "set is_causal in the config of the model",
            )
        checked = dict(kwargs)
        if self.takes_use_cache:
            checked["use_cache"] = False
        return checked


def refuse_collecting(model_class: str, layer: str, names: Iterable[str]) -> None:
    """Refuse if the library collects something from a layer that a piece cannot hand on.

    Raises:
        CutRefusedError: that is so; its ``part`` is the layer.
    """
    if refused := private.per_layer_outputs(names):
        raise CutRefusedError(
            model_class,
            f"its forward collects {' and '.join(refused)} of {layer} and all its neighbours",
            "leave output_hidden_states and output_attentions out of the arguments and the config",
            layer,
        )


def call_value(call: int, leaf: int) -> str:
    """Name of a leaf of a call's output."""
    return f"c{call}.{leaf}"


def call_index(name: str) -> int:
    """The call of a name made by :func:`call_value`."""
    return int(name[1:].partition(".")[0])


def collected_value(call: int, key: str, index: int) -> str:
    """Name of a tensor that the library collected inside a call."""
    return f"r{call}.{key}.{index}"
