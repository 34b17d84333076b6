"""The only module that touches private or version-dependent torch names.

Each name has one test in ``tests/unit/test_compat.py``, so that a torch upgrade fails there first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


def backward_keeps_graph() -> bool:
    """Whether the backward that is running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


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

    chunk: type  # TensorChunkSpec(split_dim)
    replicate: type  # _Replicate
    reducer: type  # _CustomReducer(init_value, reduce_fn)


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
