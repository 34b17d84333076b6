"""One test for each private or version-dependent torch name."""

from __future__ import annotations

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
