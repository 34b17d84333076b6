"""The only module that touches private or version-dependent torch names.

Each name has one test in ``tests/unit/test_compat.py``, so that a torch upgrade fails there first.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn


def backward_keeps_graph() -> bool:
    """Whether the backward that is running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def compiled_module_of(module: nn.Module) -> nn.Module | None:
    """The module inside the result of ``torch.compile(module)``; ``None`` for other modules."""
    # A module can only be one of these if the file that defines the class was imported.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None or not isinstance(module, eval_frame.OptimizedModule):
        return None
    inner: nn.Module = module._orig_mod
    return inner


def recompile_like(compiled: nn.Module, inner: nn.Module) -> nn.Module:
    """``inner``, compiled with the options that ``compiled`` was made with."""
    from torch._dynamo.eval_frame import OptimizedModule

    result: nn.Module = OptimizedModule(inner, compiled.dynamo_ctx)  # type: ignore[arg-type]
    return result


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` made it."""
    by_method = module.__dict__.get("_compiled_call_impl") is not None
    return by_method or compiled_module_of(module) is not None


def compile_call_like(compiled: nn.Module, replica: nn.Module) -> None:
    """If ``compiled.compile(...)`` was called, compile ``replica`` with the same options.

    The compiled call that the attribute holds is bound to the module that it was made for. Where
    its options cannot be found the replica is run eagerly.
    """
    call = compiled.__dict__.get("_compiled_call_impl")
    if call is None:
        return
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(call, "__closure__", None) or (), strict=False))
    context = cells["self"].cell_contents if "self" in cells else None
    inner = replica._call_impl
    replica.__dict__["_compiled_call_impl"] = context(inner) if callable(context) else None


def grad_dtype_is_settable() -> bool:
    """Whether a leaf's ``.grad`` may have another dtype than the leaf (``Tensor.grad_dtype``)."""
    return hasattr(torch.Tensor, "grad_dtype")


def pytree_registry() -> Mapping[type, Any]:
    """The live table of classes registered with ``torch.utils._pytree.register_pytree_node``.

    Each value has ``flatten_fn(obj) -> (children, context)`` and its inverse
    ``unflatten_fn(children, context) -> obj``. The table grows in place with later registrations.
    """
    from torch.utils import _pytree

    return _pytree.SUPPORTED_NODES


class SpecClasses(NamedTuple):
    """The classes of ``torch.distributed.pipelining.microbatch`` that describe how to split."""

    chunk: Any  # TensorChunkSpec(split_dim)
    replicate: Any  # _Replicate
    reducer: Any  # _CustomReducer(init_value, reduce_fn)


def spec_classes(load: bool = False) -> SpecClasses | None:
    """The spec classes of torch's pipelining, which take seconds to import.

    Args:
        load: import them if nobody has yet; otherwise the answer is then ``None``, which is enough
            to tell that an object is no spec.
    """
    name = "torch.distributed.pipelining.microbatch"
    module = importlib.import_module(name) if load else sys.modules.get(name)
    try:
        return SpecClasses(module.TensorChunkSpec, module._Replicate, module._CustomReducer)  # type: ignore[union-attr]
    except AttributeError:  # not imported, or another thread is importing it at this moment
        return None


class OperatorTraits(NamedTuple):
    """What an operator does with the tensors it is given."""

    is_view: bool  # its results are views of its arguments; it touches no element
    written: frozenset[int | str]  # positions of the arguments it writes, and names of keywords


def operator_traits(operator: Any) -> OperatorTraits:
    """What ``operator``, as :func:`watch_operators` shows it, does with its tensor arguments.

    Operators that carry no schema (higher-order ones) count as reading everything.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return OperatorTraits(False, frozenset())
    written = frozenset(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperatorTraits(bool(operator.is_view), written)


def watch_operators(
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> AbstractContextManager[Any]:
    """A scope in which ``run(operator, args, kwargs)`` is called in place of every operator.

    It holds for the thread that enters it, and for backward run by that thread; inside ``run``
    operators run as usual.
    """
    from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

    class Watch(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Skipping would import the compiler, which takes seconds, at the first operator.
            return False

        @classmethod
        def is_infra_mode(cls) -> bool:
            # Otherwise nothing is compiled in the scope, not even flex_attention by itself.
            return True

        def __enter__(self) -> Watch:
            # The base class also changes flags of the process, in which threads that enter and
            # leave at the same time would leave each other's values behind.
            _push_mode(self)
            return self

        def __exit__(self, *raised: object) -> None:
            _pop_mode(None)

        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            return run(func, args, kwargs or {})

    return Watch()


def host_register(tensor: torch.Tensor, device: torch.device) -> bool:
    """Page-lock the memory where ``tensor`` lies, through the runtime of ``device``.

    Returns:
        Whether that worked; runtimes without such a function say no.
    """
    module = torch.get_device_module(device)
    runtime = module.cudart() if hasattr(module, "cudart") else None
    if runtime is None:
        return False
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes == 0 or int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)) == 0


def total_memory_bytes(device: torch.device) -> int | None:
    """Size of an accelerator's memory in bytes; ``None`` where its runtime does not tell."""
    if hasattr(torch.accelerator, "get_memory_info"):  # not in every supported version
        return int(torch.accelerator.get_memory_info(device)[1])
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[1]) if hasattr(module, "mem_get_info") else None


def allow_any_grad_dtype(tensor: torch.Tensor) -> None:
    """Let ``tensor.grad`` have any dtype; nothing where torch cannot tell it so."""
    if grad_dtype_is_settable():
        tensor.grad_dtype = None


def allows_any_grad_dtype(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.grad`` may have another dtype than ``tensor``."""
    return grad_dtype_is_settable() and tensor.grad_dtype is None


def storage_is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor than this one uses its memory; yes where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # This tensor and the Python object `storage` are two users.
    return count is None or int(count(storage._cdata)) > 2


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anybody, for this optimizer or for all, wants to be told of each ``step()``."""
    from torch.optim import optimizer as module

    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = [getattr(module, name, ()) for name in names]
    hooks += [
        getattr(optimizer, name, ())
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    ]
    return any(len(of_one_kind) > 0 for of_one_kind in hooks)


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Whether the backward that is running shall give ``leaf`` a gradient.

    Not so if it was called as ``backward(inputs=...)`` or ``torch.autograd.grad`` for others.
    """
    from torch.autograd.graph import get_gradient_edge

    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # how it says that ``leaf`` is what torch.autograd.grad was called for
        return True


def hooks_of(tensor: torch.Tensor) -> Any:
    """The hooks on the gradient of a leaf, as they are kept; None without any."""
    return tensor._backward_hooks or None


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let the hooks on the gradient of ``source``, also later ones, see that of ``target``."""
    if hooks_of(source) is not None:
        target._backward_hooks = source._backward_hooks


def has_post_accumulate_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called on a leaf."""
    return bool(tensor._post_accumulate_grad_hooks)


class Flattened(NamedTuple):
    """A tensor of a subclass, taken apart."""

    parts: dict[str, torch.Tensor]
    rebuild: Callable[[dict[str, torch.Tensor]], torch.Tensor]


def flatten_subclass(tensor: torch.Tensor) -> Flattened | None:
    """The tensors inside a wrapper subclass (quantised weights); None for other tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def rebuild(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
        return result

    return Flattened({name: getattr(tensor, name) for name in names}, rebuild)


def storage_addresses(tensor: torch.Tensor) -> set[int]:
    """Where the memory of a tensor, or of the tensors inside it, begins."""
    inside = flatten_subclass(tensor)
    if inside is not None:
        return set().union(*(storage_addresses(part) for part in inside.parts.values()))
    if tensor.layout is not torch.strided:
        return set()
    return {tensor.untyped_storage().data_ptr()}


def compiled_graphs() -> int:
    """How many graphs ``torch.compile`` has made in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def watch_random_operators() -> Iterator[list[str]]:
    """A scope that notes the operators which draw random numbers in it.

    It holds for the calling thread and for backward that it runs.
    """
    drawn: list[str] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            drawn.append(str(operator))
        return operator(*args, **kwargs)

    with watch_operators(run):
        yield drawn
