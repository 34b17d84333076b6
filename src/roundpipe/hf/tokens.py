"""Tensors that stand in for outputs of layers and tell what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from roundpipe.hf.stubs import active_run
from roundpipe.microbatch.tree import flatten

# Reading one of these means that the code branches on, or leaves torch with, the data.
_READS_VALUE = frozenset(
    {
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "data_ptr",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
    }
)


class Token(torch.Tensor):
    """A tensor whose users are recorded by the active run.

    Shape, dtype and device are those of a real output. Results of operations are tokens again.

    Attributes:
        token_name: the name of the tensor it stands for; ``None`` until the run gives it one.
        roots: names of the outputs that its value depends on.
    """

    token_name: str | None = None
    roots: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and tell the active run."""
        run = active_run()
        if run is not None and func.__name__ in _READS_VALUE:
            run.value_read(func.__name__, args)
        if run is not None and _in_place(func):
            run.changes_in_place(func.__name__)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Token) and result.token_name is not None and not _in_place(func):
            # ``to`` and others return their argument where nothing is to be done. With the real
            # tensor there may be something to do, so that it has to count as an operation.
            result = super().__torch_function__(torch.Tensor.detach, types, (result,))
        if run is not None and (result is None or _has_tensor(result)):
            run.record(func, args, kwargs or {}, result)
        return result


def _in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if name.startswith("__"):
        if name == "__setitem__":
            return True
        return name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_")


def roots_of(tree: Any) -> frozenset[str]:
    """Names of the outputs that the tokens in ``tree`` depend on."""
    leaves, _ = flatten(tree)
    return frozenset().union(*(leaf.roots for leaf in leaves if isinstance(leaf, Token)))


def make_token(value: torch.Tensor, name: str, roots: frozenset[str]) -> Token:
    """A token with the values of ``value``, which it shares."""
    token = value.detach().as_subclass(Token)
    token.token_name = name
    token.roots = roots
    return token


def blank(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of any size that occupy one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def _has_tensor(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(_has_tensor(item) for item in result)
    return isinstance(result, torch.Tensor)
