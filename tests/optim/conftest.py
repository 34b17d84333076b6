"""The same tests with every instruction set, and without kernels on torch's own optimizers."""

from __future__ import annotations

import pytest

from roundpipe.optim import base, native
from roundpipe.optim.native import Isa, Kernels


@pytest.fixture
def kernels() -> Kernels:
    """The compiled kernels at their best."""
    loaded = native.load_kernels()
    if loaded is None:
        pytest.skip("the kernels are not built: install the package with a compiler")
    return loaded


def _names() -> list[str]:
    """What this machine can run; test_optim_native.py says what it cannot."""
    loaded = native.load_kernels()
    return ["torch", *(isa.name.lower() for isa in (loaded.available() if loaded else []))]


@pytest.fixture(params=_names())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs the steps of this test: an instruction set's kernels, or torch."""
    name: str = request.param
    loaded = native.load_kernels()
    bound = loaded.bound_to(Isa[name.upper()]) if loaded and name != "torch" else None
    monkeypatch.setattr(base, "load_kernels", lambda: bound)
    return name
