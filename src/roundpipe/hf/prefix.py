"""The first piece: everything up to the first layer, and the plan for the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.grafting import Graft
from roundpipe.hf import private
from roundpipe.hf.blueprint import (
    Blueprint,
    LeafSpec,
    call_index,
    call_value,
    refuse_collecting,
)
from roundpipe.hf.encode import Encoder
from roundpipe.hf.plan import (
    TAIL_OPTIONS,
    Arguments,
    Blank,
    Call,
    Const,
    Expr,
    Operation,
    Plan,
    State,
    TailOptions,
    Tree,
)
from roundpipe.hf.refusal import CutRefusedError
from roundpipe.hf.skeleton import SkeletonPiece, first_device
from roundpipe.hf.stubs import activate, is_plain
from roundpipe.hf.tokens import Token, blank, make_token, roots_of
from roundpipe.microbatch.tree import flatten


class _PrefixDoneError(BaseException):
    """Leaves the library's forward at the last layer; no ``except Exception`` stops it."""


class PrefixPiece(SkeletonPiece):
    """Runs embeddings, masks and what else comes before the layers.

    Its forward takes the arguments of the model and returns the :class:`State` for layer 0.
    """

    def __init__(self, skeleton: Graft, blueprint: Blueprint) -> None:
        super().__init__(skeleton)
        self.blueprint = blueprint

    def forward(self, *args: Any, **kwargs: Any) -> State:
        """Run the library's forward until it calls the last layer."""
        options = kwargs.pop(TAIL_OPTIONS, None) or TailOptions()
        kwargs = self.blueprint.check_arguments(args, kwargs)
        device = first_device((args, kwargs), self)
        run = PrefixRun(self.blueprint, device, self.skeleton, args, kwargs)
        # With gradients whatever the caller's mode: only so the calls that the library itself
        # runs without gradients can be told from the others.
        with activate(run), torch.enable_grad():
            try:
                self.skeleton(*args, **kwargs)
            except _PrefixDoneError:
                pass
            else:
                run.refuse_missing_calls()
        return run.state(options, keep_graph=torch.is_grad_enabled())


class PrefixRun:
    """One pass of the library's forward, with stand-ins for the outputs of layers."""

    def __init__(
        self,
        blueprint: Blueprint,
        device: torch.device,
        skeleton: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.model_class = blueprint.model_class
        self.device = device
        self._blueprint = blueprint
        names = {id(p): n for n, p in skeleton.named_parameters(remove_duplicate=False)}
        self._encoder = Encoder(self.model_class, device, names)
        self._inputs = self._encoder.inputs(args, kwargs)
        self._calls: list[tuple[Arguments, bool, tuple[str, ...]]] = []
        self._operations: list[tuple[int, Operation]] = []
        self._after: dict[str, int] = {}  # for each token, the call after which it exists
        self._held: dict[str, list[Expr]] = defaultdict(list)

    def call(self, element: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call and return tokens; at the last call, leave the forward."""
        index = len(self._calls)
        spec = self._blueprint.expected_call(index, element)
        collect = tuple(private.active_collector())
        refuse_collecting(self.model_class, self._blueprint.elements[element], collect)
        grad = torch.is_grad_enabled()
        self._calls.append((self._encoder.arguments(args, kwargs), grad, collect))
        if index + 1 == len(self._blueprint.calls):
            if not grad:
                raise CutRefusedError(
                    self.model_class,
                    "it calls its last layer without gradients, inside an autograd function of its "
                    "own",
                )
            raise _PrefixDoneError

        def token(leaf: int, leaf_spec: LeafSpec, arguments: list[Any]) -> Token:
            name = call_value(index, leaf)
            self._after[name] = index
            assert leaf_spec.dtype is not None
            value = blank(leaf_spec.shape(arguments), leaf_spec.dtype, self.device)
            return make_token(value, name, frozenset((name,)))

        return spec.output.make(args, kwargs, token)

    def held(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """In the prefix every module runs."""
        return False, None

    def note_held(self, name: str, output: Any) -> None:
        """Note what a module put out, so that the tail need not run it."""
        if self._calls:
            return  # from the first layer on the tail runs it again
        position = (name, len(self._held[name]))
        leaves, structure = flatten(output)
        exprs = [self._held_leaf((*position, i), leaf) for i, leaf in enumerate(leaves)]
        self._held[name].append(exprs[0] if structure.is_leaf else Tree(structure, tuple(exprs)))

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation on tokens; it will be done again between the real layers."""
        leaves, _ = flatten(result)
        arguments = self._encoder.operands(args, kwargs)
        after = max(
            self._after[n] for e in arguments.exprs() for n in e.reads() if n in self._after
        )
        roots = roots_of((args, kwargs))
        number = len(self._operations)
        results: list[str | None] = []
        for i, leaf in enumerate(leaves):
            name = f"g{number}.{i}" if isinstance(leaf, Token) else None
            results.append(name)
            if name is not None:
                leaf.token_name, leaf.roots = name, roots
                self._after[name] = after
        operation = Operation(func, arguments, tuple(results), torch.is_grad_enabled())
        self._operations.append((after, operation))

    def _check_parameters(self, after: int, arguments: Arguments) -> None:
        known = self._blueprint.glue_parameters
        if known is None:
            return  # the blueprint is being made
        for name in (n for e in arguments.exprs() for n in e.parameters()):
            if name not in known.get(after, ()):
                raise CutRefusedError(
                    self.model_class,
                    f"after layer call {after} it uses the parameter {name}, which it did not when "
                    "the model was cut",
                    "pass cut_model an example like your batches",
                )

    def position(self) -> str:
        """How many layers were called."""
        return f"after {len(self._calls)} of {len(self._blueprint.calls)} calls of layers"

    def changes_in_place(self, name: str) -> None:
        """Refuse: the next piece may be given the same tensor again, for a recompute."""
        raise CutRefusedError(
            self.model_class,
            f"between its layers it changes the output of a layer in place ({name})",
        )

    def value_read(self, name: str, args: Any) -> None:
        """Refuse: a token has no values."""
        call = min(call_index(root) for root in roots_of(args))
        raise CutRefusedError(
            self.model_class,
            f"between its layers it reads the values of a layer's output ({name})",
            part=self._blueprint.elements[self._blueprint.calls[call].element],
        )

    def refuse_missing_calls(self) -> None:
        """The forward ended before the last layer was called."""
        expected = len(self._blueprint.calls)
        raise CutRefusedError(
            self.model_class,
            f"its forward made {len(self._calls)} calls of layers; it was {expected} when the "
            "model was cut. Layers that are skipped at random cannot be cut",
            "set layerdrop to 0, or pass cut_model an example like your batches",
        )

    def state(self, options: TailOptions, *, keep_graph: bool) -> State:
        """Put the plan together.

        Args:
            options: for the tail.
            keep_graph: whether gradients will flow back into the prefix.
        """
        plan = self._plan(options)
        tensors = {}
        for name, tensor in self._encoder.table.items():
            if name in plan.alive:
                tensors[name] = _handed_on(tensor, keep_graph)
        return State(plan, tensors, {})

    def _plan(self, options: TailOptions) -> Plan:
        tail = len(self._calls)
        last_use: dict[str, int] = {}
        containers_last_use: dict[int, int] = {}

        def use(exprs: Iterable[Expr], piece: int) -> None:
            for expr in exprs:
                for name in expr.reads():
                    last_use[name] = max(piece, last_use.get(name, -1))
                for index in expr.container_indices():
                    containers_last_use[index] = max(piece, containers_last_use.get(index, -1))

        use(self._inputs.exprs(), tail)
        for held in self._held.values():
            use(held, tail)
        last_use.update(dict.fromkeys(self._blueprint.tail_reads, tail))
        for index, (arguments, _, _) in enumerate(self._calls):
            use(arguments.exprs(), index)
        for index, piece in containers_last_use.items():
            use((self._encoder.containers[index].contents,), piece)
        operations: dict[int, list[Operation]] = defaultdict(list)
        for after, operation in reversed(self._operations):
            if any(name in last_use for name in operation.results):
                self._check_parameters(after, operation.arguments)
                operations[after].insert(0, operation)
                use(operation.arguments.exprs(), after)
        drops: dict[int, set[str]] = defaultdict(set)
        for name, piece in last_use.items():
            drops[piece].add(name)
        drops_containers: dict[int, set[int]] = defaultdict(set)
        for index, piece in containers_last_use.items():
            drops_containers[piece].add(index)
        calls = [
            Call(
                arguments,
                grad,
                collect,
                tuple(operations[index]),
                frozenset(drops[index]),
                frozenset(drops_containers[index]),
            )
            for index, (arguments, grad, collect) in enumerate(self._calls)
        ]
        return Plan(
            tuple(calls),
            tuple(self._encoder.containers),
            self._inputs,
            {name: tuple(exprs) for name, exprs in self._held.items()},
            frozenset(last_use),
            options,
        )

    def _held_leaf(self, position: tuple[str, int, int], leaf: Any) -> Expr:
        if not isinstance(leaf, torch.Tensor):
            if not is_plain(leaf):
                raise CutRefusedError(
                    self.model_class,
                    f"{position[0]} returned a {type(leaf).__name__}, and no such thing when the "
                    "model was cut",
                    "pass cut_model an example like your batches",
                )
            return Const(leaf)
        # Integers and masks may be read as values by the tail's code, so they are kept as they are.
        if position in self._blueprint.tail_reads_held or not leaf.dtype.is_floating_point:
            return self._encoder.tensor(leaf)
        return Blank(tuple(leaf.shape), leaf.dtype)


def _handed_on(tensor: torch.Tensor, keep_graph: bool) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    if not keep_graph:
        return tensor.detach()
    # A parameter that is handed on as it is would be taken for this piece's own leaf.
    return tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor
