"""One test for each private or version-dependent torch name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from roundpipe import compat


def test_pytree_registry_is_live_and_knows_how_to_flatten() -> None:
    class Box:
        def __init__(self, inner: int) -> None:
            self.inner = inner

    registry = compat.pytree_registry()
    assert Box not in registry
    _pytree.register_pytree_node(Box, lambda b: ([b.inner], "c"), lambda v, _: Box(next(iter(v))))
    children, context = registry[Box].flatten_fn(Box(3))
    assert list(children) == [3]
    assert registry[Box].unflatten_fn([4], context).inner == 4


def test_spec_classes_are_torchs_own() -> None:
    classes = compat.spec_classes(load=True)
    assert classes is not None
    assert classes == compat.spec_classes()
    assert classes.chunk(2).split_dim == 2
    assert classes.replicate.__name__ == "_Replicate"
    reducer = classes.reducer(1, max)
    assert (reducer.init_value, reducer.reduce_fn) == (1, max)


def test_spec_classes_need_no_import_to_say_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining.microbatch", raising=False)
    assert compat.spec_classes() is None


def test_watch_sees_forward_and_backward_operators_of_the_entering_thread() -> None:
    seen: list[str] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(str(operator))
        return operator(*args, **kwargs)

    weight = torch.ones(2, 2, requires_grad=True)
    with compat.watch_operators(run):
        (weight @ weight).sum().backward()
    assert seen.count("aten.mm.default") == 3  # one in the forward, two in the backward
    after = len(seen)
    _ = weight * 2
    assert len(seen) == after


def test_operator_traits_tell_views_and_writes() -> None:
    aten = torch.ops.aten
    assert compat.operator_traits(aten.view.default) == (True, frozenset())
    assert compat.operator_traits(aten.add.Tensor) == (False, frozenset())
    assert compat.operator_traits(aten.add_.Tensor) == (False, {0})
    assert compat.operator_traits(aten._foreach_add_.List) == (False, {0})
    assert compat.operator_traits(aten.add.out) == (False, {"out"})
    assert compat.operator_traits(object()) == (False, frozenset())


def test_total_memory_is_asked_of_whoever_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda d: (1, 2), raising=False)
    assert compat.total_memory_bytes(device) == 2
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert compat.total_memory_bytes(device) is None
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda d: (3, 4), raising=False)
    assert compat.total_memory_bytes(device) == 4
