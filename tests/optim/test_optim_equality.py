"""Every optimizer computes what torch's does, whatever runs its steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optim.cases import CASES, FUSED_IN_TORCH, PLAIN, Case, assert_close, copies, parameters, train

# 0 and 1 element, less than a block, exactly one, several and a rest, more than two threads' chunks
SHAPES = [(0, 3), (), (1,), (63,), (64,), (7, 31), (70_001,)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_equal_torchs(case: Case, backend: str) -> None:
    params = parameters(SHAPES[:-1])
    expected = copies(params)
    train(case.reference(expected), expected)
    before = copies(params)
    train(case.ours(params), params)
    assert_close(params, expected)
    moved = [not torch.equal(one, other) for one, other in zip(before, params, strict=True)]
    assert moved == [param.numel() > 0 for param in params]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_large_parameters_and_several_threads_equal_torchs(case: Case, backend: str) -> None:
    params = parameters(SHAPES)
    expected = copies(params)
    train(case.reference(expected), expected, steps=3)
    train(case.ours(params), params, steps=3)
    assert_close(params, expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in FUSED_IN_TORCH], ids=str)
def test_whole_vectors_equal_torchs_fused_kernels_bit_for_bit(case: Case, backend: str) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch computes without fused multiply-add here")
    # Sizes that torch's vectors divide: it computes the rest of an array in another way.
    params = parameters([(64,), (16, 1024)])
    expected = copies(params)
    train(case.reference(expected, fused=True), expected)
    train(case.ours(params), params)
    for one, other in zip(params, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["SGD", "Adamax", "ASGD", "Rprop", "Lion"])
def test_algorithms_without_roots_equal_torch_bit_for_bit(name: str, backend: str) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch computes without fused multiply-add here")
    for case in (c for c in CASES if c.name == name):
        params = parameters([(64,), (16, 1024)])
        expected = copies(params)
        train(case.reference(expected), expected)
        train(case.ours(params), params)
        for one, other in zip(params, expected, strict=True):
            assert torch.equal(one, other), str(case)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    case=st.sampled_from(CASES),
    shapes=st.lists(
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
)
def test_random_shapes_equal_torchs(
    case: Case, shapes: list[tuple[int, ...]], seed: int, backend: str
) -> None:
    params = parameters(shapes, seed)
    expected = copies(params)
    train(case.reference(expected), expected, seed=seed)
    train(case.ours(params), params, seed=seed)
    assert_close(params, expected)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_infinite_and_nan_gradients_spread_as_in_torch(case: Case, backend: str) -> None:
    grad = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 0.0])
    results = []
    for make in (case.reference, case.ours):
        param = torch.ones(5, requires_grad=True)
        optimizer = make([param])
        for _ in range(2):
            param.grad = grad.clone()
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert results[0][0].isfinite()
    assert case.name in ("Rprop", "Lion") or results[0][3].isnan()


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_number_of_threads_does_not_change_a_bit(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        params = parameters([(150_001,), (90_000,), (3,)])
        train(case.ours(params), params, steps=2)
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
