"""Whether a value is the same in every microbatch."""

from __future__ import annotations

from math import isnan
from typing import Any

import torch

from roundpipe.microbatch.dtensor import is_dtensor


def same_value(a: Any, b: Any) -> bool:
    """Whether two leaves are equal. NaN equals NaN; what cannot be compared is not equal."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_tensor(a, b)
    try:
        equal: Any = a == b
        if not isinstance(equal, bool) and hasattr(equal, "all"):
            equal = a.shape == b.shape and equal.all()  # arrays of other libraries
        return bool(equal) or (isinstance(a, float) and isnan(a) and isnan(b))
    except Exception:  # noqa: BLE001 - whatever a foreign comparison raises, it did not say "equal"
        return False


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if is_dtensor(a) and is_dtensor(b):
        local_a, local_b = a.to_local(), b.to_local()  # type: ignore[attr-defined]
        return a.shape == b.shape and _same_tensor(local_a, local_b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
