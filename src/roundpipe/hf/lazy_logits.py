"""Logits that are computed when something needs them.

While the library's code runs over a model's tail, the head's projection returns a
:class:`LazyLogits`. What the library then does to logits on the way to the loss (scaling, capping,
casts, dropping and flattening rows) is noted, and ``cross_entropy`` computes in chunks. Anything
else makes the logits real, by the same operations that the library called, so laziness never
changes what a model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roundpipe.hf.chunked_loss import ChunkedLoss, Step, chunked_cross_entropy, rows_per_chunk
from roundpipe.microbatch.tree import flatten, unflatten

# Below this size chunks bring nothing, and bits stay those of the uncut model.
LAZY_FROM_BYTES = 64 * 2**20

_KNOWN_WITHOUT_VALUES = frozenset(
    {
        "__len__",
        "device",
        "dim",
        "dtype",
        "element_size",
        "is_complex",
        "is_cpu",
        "is_cuda",
        "is_floating_point",
        "is_meta",
        "is_nested",
        "is_sparse",
        "layout",
        "ndim",
        "nelement",
        "numel",
        "shape",
        "size",
    }
)
_ELEMENTWISE = frozenset(
    {
        "__add__",
        "__mul__",
        "__neg__",
        "__radd__",
        "__rmul__",
        "__sub__",
        "__truediv__",
        "add",
        "bfloat16",
        "clamp",
        "div",
        "double",
        "float",
        "half",
        "mul",
        "multiply",
        "neg",
        "sub",
        "tanh",
        "to",
        "true_divide",
    }
)
_RESHAPES = frozenset({"flatten", "reshape", "squeeze", "unsqueeze", "view"})
_NUMBERS = (bool, int, float, torch.dtype, type(None))


class LazyLogits(torch.Tensor):
    """Stands for ``steps(hidden @ weight.T + bias)``; a tensor in all respects.

    Attributes:
        hidden: (..., features); its leading dimensions are those of the logits.
        weight: (vocabulary, features).
        bias: (vocabulary,) or ``None``.
        steps: elementwise functions, in order.
        whole: the logits, once they had to be computed.
        compute: computes them, by the operations that the library called.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Step, ...]
    whole: Tensor | None
    compute: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the operation, or do it on the real logits."""
        kwargs = kwargs or {}
        name = _name(func)
        if name in _KNOWN_WITHOUT_VALUES:
            return super().__torch_function__(func, types, tuple(args), kwargs)
        lazy = args[0] if args else None
        if name == "requires_grad" and isinstance(lazy, LazyLogits):
            return torch.is_grad_enabled() and any(
                t is not None and t.requires_grad for t in (lazy.hidden, lazy.weight, lazy.bias)
            )
        if isinstance(lazy, LazyLogits) and lazy.whole is None:
            result = _deferred(lazy, func, name, args[1:], kwargs)
            if result is not None:
                return result
        leaves, structure = flatten((tuple(args), kwargs))
        real = [computed(leaf) if isinstance(leaf, LazyLogits) else leaf for leaf in leaves]
        args, kwargs = unflatten(structure, real)
        return func(*args, **kwargs)


def project_lazily(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> LazyLogits:
    """``F.linear(hidden, weight, bias)``, later."""
    dtype = F.linear(hidden.reshape(-1, hidden.shape[-1])[:1], weight, bias).dtype
    made = _make(hidden, weight, bias, (), dtype)
    made.compute = lambda: F.linear(hidden, weight, bias)
    return made


def computed(lazy: LazyLogits) -> Tensor:
    """The logits, in full."""
    if lazy.whole is None:
        lazy.whole = lazy.compute()
    return lazy.whole


def _make(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    steps: tuple[Step, ...],
    dtype: torch.dtype,
) -> LazyLogits:
    shape = (*hidden.shape[:-1], weight.shape[0])
    blank = torch.zeros((), dtype=dtype, device=hidden.device).expand(shape)
    made = blank.as_subclass(LazyLogits)
    made.hidden, made.weight, made.bias, made.steps = hidden, weight, bias, steps
    made.whole = None
    return made


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # a property such as shape
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


def _deferred(
    lazy: LazyLogits,
    func: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """The result without logits; ``None`` where it cannot be had."""
    if func is F.cross_entropy:
        return _cross_entropy(lazy, *args, **kwargs)
    if name == "contiguous" and not args and not kwargs:
        return lazy
    made: LazyLogits | None = None
    if name in _ELEMENTWISE and _all_numbers((*args, *kwargs.values())):
        made = _with_step(lazy, func, args, kwargs)
    elif name in _RESHAPES:
        made = _reshaped(lazy, func, args, kwargs)
    elif name == "__getitem__":
        made = _indexed(lazy, args[0])
    if made is not None:
        made.compute = lambda: func(computed(lazy), *args, **kwargs)
    return made


def _all_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, _NUMBERS) for value in values)


def _with_step(
    lazy: LazyLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> LazyLogits:
    def step(value: Tensor) -> Tensor:
        result: Tensor = func(value, *args, **kwargs)
        return result

    dtype = step(torch.empty(1, dtype=lazy.dtype, device=lazy.device)).dtype
    return _make(lazy.hidden, lazy.weight, lazy.bias, (*lazy.steps, step), dtype)


def _reshaped(
    lazy: LazyLogits, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> LazyLogits | None:
    """Rows, one after the other, in another arrangement."""
    meta = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
    result = func(meta, *args, **kwargs)
    if not isinstance(result, Tensor) or result.dim() == 0 or result.shape[-1] != lazy.shape[-1]:
        return None
    hidden = lazy.hidden.reshape(*result.shape[:-1], lazy.hidden.shape[-1])
    return _make(hidden, lazy.weight, lazy.bias, lazy.steps, result.dtype)


def _indexed(lazy: LazyLogits, index: Any) -> LazyLogits | None:
    """Some of the rows, if no row is cut."""
    rows = lazy.dim() - 1
    if isinstance(index, Tensor):
        if type(index) is not Tensor or index.dtype not in (torch.bool, torch.int64):
            return None
        if index.dtype is torch.bool and index.dim() > rows:
            return None
    else:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, (int, slice, type(...))) for part in parts):
            return None
        if ... in parts:
            at = parts.index(...)
            missing = lazy.dim() - len(parts) + 1
            parts = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
        if len(parts) > rows and (len(parts) > rows + 1 or parts[-1] != slice(None)):
            return None
        index = parts[:rows]
    if rows == 0:
        return None
    return _make(lazy.hidden[index], lazy.weight, lazy.bias, lazy.steps, lazy.dtype)


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss in chunks, if it is a plain one."""
    unusual = weight is not None or size_average is not None or reduce is not None
    if unusual or label_smoothing != 0 or reduction not in ("sum", "mean"):
        return None
    if lazy.dim() != 2 or target.dim() != 1 or target.dtype is not torch.int64:
        return None
    rows = rows_per_chunk(lazy.shape[-1], lazy.device)
    loss = ChunkedLoss(lazy.steps, ignore_index, rows)
    total = chunked_cross_entropy(lazy.hidden, lazy.weight, lazy.bias, target, loss)
    return total if reduction == "sum" else total / (target != ignore_index).sum()
