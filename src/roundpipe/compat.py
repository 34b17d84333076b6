"""The only module that touches private or version-dependent torch names.

Each name has one test in ``tests/unit/test_compat.py``, so that a torch upgrade fails there first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pytree_registry() -> Mapping[type, Any]:
    """The live table of classes registered with ``torch.utils._pytree.register_pytree_node``.

    Each value has ``flatten_fn(obj) -> (children, context)`` and its inverse
    ``unflatten_fn(children, context) -> obj``. The table grows in place with later registrations.
    """
    from torch.utils import _pytree

    return _pytree.SUPPORTED_NODES
