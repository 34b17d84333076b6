"""Moments in bfloat16: half the memory, unbiased, and the same training."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from optim.cases import Case, assert_close, copies, parameters, train
from roundpipe import optim
from roundpipe.errors import InvalidValueError
from roundpipe.optim import Binding
from roundpipe.optim.moments import round_moment, rounding_seed
from roundpipe.optim.native import Algorithm, Isa, Kernels, Task

HALF = torch.bfloat16


def test_a_trained_parameter_costs_16_bytes_and_12_with_bfloat16_moments(backend: str) -> None:
    """2 parameter, 2 gradient, 4 master, 8 or 4 moments."""
    for moment_dtype, expected in ((torch.float32, 16), (HALF, 12)):
        numel = 1000
        gradient, parameter = torch.zeros(numel).bfloat16(), torch.zeros(numel).bfloat16()
        master = torch.zeros(numel, requires_grad=True)
        optimizer = optim.AdamW([master], moment_dtype=moment_dtype)
        optimizer.step_fused({master: Binding(gradient, parameter)})
        state = optimizer.state[master]
        moments = [value for value in state.values() if value.ndim]
        total = sum(t.nbytes for t in (gradient, parameter, master, *moments))
        assert total == expected * numel
        assert state["step"].nbytes == 4
        assert master.grad is None


def test_rounding_goes_up_and_down_and_is_right_in_the_mean() -> None:
    spacing = 2.0**-7
    value = torch.full((40_000,), 1.0 + 0.3 * spacing)
    rounded = round_moment(value, rounding_seed(0, 3), 0).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + spacing}
    share = (rounded > 1).float().mean().item()
    assert share == pytest.approx(0.3, abs=0.01)  # four standard deviations
    other = round_moment(value, rounding_seed(0, 4), 0).float()
    agreement = (rounded == other).float().mean().item()
    assert agreement == pytest.approx(0.3**2 + 0.7**2, abs=0.015)


def test_what_bfloat16_can_hold_stays_as_it_is() -> None:
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(HALF)
    rounded = round_moment(exact.float(), rounding_seed(1, 1), 1)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numel", [1, 63, 64, 70_001])
@pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)
def test_kernels_and_torch_operations_round_alike(numel: int, isa: Isa, kernels: Kernels) -> None:
    """So a run gives the same bits with and without the kernels, up to the steps' own rounding."""
    if isa not in kernels.available():
        pytest.skip(f"this machine has no {isa.name}")
    values = torch.randn(numel) * torch.logspace(-30, 30, numel)
    values[0] = float("nan")
    seed = rounding_seed(5, 77)
    for state_index in (0, 1):
        states = tuple(torch.zeros(numel, dtype=HALF) for _ in range(2))
        # With both betas zero, Adam's averages are the gradient and its square.
        task = Task(
            param=torch.zeros(numel),
            grad=values if state_index == 0 else values.abs().sqrt(),
            published=None,
            states=states,
            scalars=(0.0, 0.0, 0.0, 1.0, 1.0, 0.0),
            seed=seed,
        )
        kernels.bound_to(isa).step(Algorithm.ADAM, [task])
        stored = values if state_index == 0 else task.grad * task.grad
        expected = round_moment(stored, seed, state_index)
        torch.testing.assert_close(states[state_index], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_rounded_runs_equal_a_loop_that_rounds_after_each_step(name: str, backend: str) -> None:
    params = parameters([(7, 9), (130,)])
    expected = copies(params)
    case = Case(name, {"amsgrad": True})
    optimizer, reference = case.ours(params, moment_dtype=HALF), case.reference(expected)
    for step in range(5):
        for steps, theirs in ((optimizer, params), (reference, expected)):
            train(steps, theirs, steps=1, seed=step)
        for ordinal, param in enumerate(expected):
            state = reference.state[param]
            for index, moment in enumerate(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")):
                rounded = round_moment(state[moment], rounding_seed(ordinal, step), index)
                state[moment] = rounded.float()
    # A last-place difference before the rounding can become one bfloat16 spacing after it.
    assert_close(params, expected, tolerance=1e-4)
    for param, other in zip(params, expected, strict=True):
        mine, theirs = optimizer.state[param]["exp_avg"], reference.state[other]["exp_avg"]
        assert mine.dtype == HALF
        different = (mine.float() != theirs).float().mean().item()
        assert different < 0.02


def test_layouts_do_not_matter(backend: str) -> None:
    param = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    flat = torch.as_strided(param.detach(), (120,), (1,)).clone().requires_grad_()
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    param.grad, flat.grad = grad, torch.as_strided(grad, (120,), (1,)).clone()
    for each in (param, flat):
        optim.AdamW([each], moment_dtype=HALF).step()
    assert torch.equal(torch.as_strided(param.detach(), (120,), (1,)), flat.detach())


def test_states_move_between_precisions_through_a_checkpoint(backend: str) -> None:
    params = parameters([(50,)])
    full = optim.AdamW(params)
    train(full, params, steps=3)
    half = optim.AdamW(params, moment_dtype=HALF)
    half.load_state_dict(copy.deepcopy(full.state_dict()))
    train(half, params, steps=1)
    assert half.state[params[0]]["exp_avg"].dtype == HALF
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for optimizer in (torch.optim.AdamW(params), optim.AdamW(params)):
        optimizer.load_state_dict(state)
        average = optimizer.state[params[0]]["exp_avg"]
        assert average.dtype == torch.float32
        assert torch.equal(average, half.state[params[0]]["exp_avg"].float())
        train(optimizer, params, steps=1)
    copied = copy.deepcopy(half)
    assert copied.moment_dtype == HALF


def test_a_resumed_run_gives_the_same_bits(kernels: Kernels) -> None:
    params = parameters([(300,)])
    other = copies(params)
    optimizer = optim.AdamW(params, moment_dtype=HALF)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(300, generator=generator) for _ in range(6)]
    for grad in grads:
        params[0].grad = grad
        optimizer.step()
    state = None
    for half in (grads[:3], grads[3:]):
        resumed = optim.AdamW(other, moment_dtype=HALF)
        if state is not None:
            resumed.load_state_dict(state)
        for grad in half:
            other[0].grad = grad
            resumed.step()
        state = copy.deepcopy(resumed.state_dict())
    assert torch.equal(params[0], other[0])


def _spiral(points: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(points, generator=generator) * 9
    label = torch.randint(0, 2, (points,), generator=generator)
    turned = angle + label * torch.pi
    return torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 9, label


def _final_loss(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> float:
    x, y = _spiral(256)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


class _NearestAdam(torch.optim.Adam):
    """What stochastic rounding is for: moments rounded to the nearest bfloat16."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


def test_training_with_bfloat16_moments_converges_like_float32(kernels: Kernels) -> None:
    steps = 400
    betas = (0.9, 0.999)
    losses = {}
    for name in ("float32", "stochastic"):
        model = _model()
        dtype = HALF if name == "stochastic" else torch.float32
        optimizer = optim.Adam(model.parameters(), lr=5e-3, betas=betas, moment_dtype=dtype)
        losses[name] = _final_loss(optimizer, model, steps)
    assert losses["float32"] < 0.05
    assert losses["stochastic"] < 2 * losses["float32"]


def test_a_slow_average_moves_only_with_stochastic_rounding(kernels: Kernels) -> None:
    """Gradients shrink tenfold: rounded to nearest, the square average would never notice."""
    steps = 800
    results = {}
    for name in ("exact", "stochastic", "nearest"):
        param = torch.zeros(2000, requires_grad=True)
        optimizer = {
            "exact": lambda p: torch.optim.Adam(p, lr=0.0),
            "stochastic": lambda p: optim.Adam(p, lr=0.0, moment_dtype=HALF),
            "nearest": lambda p: _NearestAdam(p, lr=0.0),
        }[name]([param])
        param.grad = torch.ones(2000)
        optimizer.step()
        param.grad = torch.full((2000,), 0.1)
        for _ in range(steps):
            optimizer.step()
        results[name] = optimizer.state[param]["exp_avg_sq"].float().mean().item()
    assert results["stochastic"] == pytest.approx(results["exact"], rel=0.01)
    assert results["nearest"] != pytest.approx(results["exact"], rel=0.1)


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(
    cls: type[optim.Adam] | type[optim.AdamW], dtype: torch.dtype
) -> None:
    with pytest.raises(InvalidValueError, match=r"moment_dtype is .*; expected torch.float32, or"):
        cls([torch.zeros(1, requires_grad=True)], moment_dtype=dtype)
