"""Optimizers by name, and the learning rate over the steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundpipe.cli.optimizers import build_optimizer, build_schedule, find_optimizer, lr_factor
from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import OptimizerSection, ScheduleSection


def weights(*shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape or (2, 2)))]


def build(**section: object) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerSection.model_validate(section), weights())


def schedule(**section: object) -> ScheduleSection:
    return ScheduleSection.model_validate(section)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_every_usual_optimizer_is_found_by_name_and_steps(name: str) -> None:
    optimizer = build(name=name, lr=0.1)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert bool((weight < 0).all())
    assert type(optimizer).__name__ == name


def test_arguments_reach_the_optimizer_and_it_is_fused_where_it_can_be() -> None:
    group = build(
        lr=0.5, weight_decay=0.25, options={"betas": [0.5, 0.75], "eps": 1.0}
    ).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.5, 0.25, 1.0)
    assert group["betas"] == (0.5, 0.75)
    assert group["fused"]
    assert not build(options={"fused": False}).param_groups[0]["fused"]


def test_lists_become_tuples_and_names_become_dtypes() -> None:
    optimizer = build(options={"moment_dtype": "bfloat16"})
    assert vars(optimizer)["moment_dtype"] == torch.bfloat16
    with pytest.raises(UsageError, match=r"optimizer\.options\.moment_dtype: 'bf16' is no dtype"):
        build(options={"moment_dtype": "bf16"})


def test_our_own_optimizers_come_first_and_torchs_are_there_too() -> None:
    assert find_optimizer("AdamW").__module__.startswith("roundpipe.")
    assert find_optimizer("Adafactor").__module__.startswith("torch.")
    for name in ("Optimizer", "KernelOptimizer"):
        with pytest.raises(UsageError, match="there is no optimizer"):
            find_optimizer(name)


def test_an_unknown_optimizer_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"optimizer\.name: .* 'adamw'; did you mean 'AdamW'\?"):
        find_optimizer("adamw")
    with pytest.raises(UsageError, match=r"there is no optimizer 'xyzzy'; known: .*AdamW"):
        find_optimizer("xyzzy")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_need_more_than_gradients_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot step on finished gradients"):
        find_optimizer(name)


def test_arguments_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(UsageError, match="AdamW takes no 'beta'; it takes lr, betas, eps"):
        build(options={"beta": 0.9})
    with pytest.raises(UsageError, match="Rprop takes no 'weight_decay'"):
        build(name="Rprop", weight_decay=0.1)
    with pytest.raises(UsageError, match="optimizer: AdamW refuses: Invalid epsilon value"):
        build(options={"eps": -1.0})


def test_an_optimizer_without_weight_decay_works_without_it() -> None:
    assert type(build(name="Rprop")).__name__ == "Rprop"


def test_the_schedule_sets_the_rate_of_each_step() -> None:
    optimizer = build(name="SGD", lr=2.0)
    scheduler = build_schedule(schedule(kind="linear", warmup_steps=2), 6, optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_cosine_passes_the_middle_half_way() -> None:
    cosine = schedule(kind="cosine", final_ratio=0.2)
    assert [lr_factor(cosine, 10, step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.6, 0.2])


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    total=st.integers(1, 200),
    share=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_the_rate_rises_then_never_again_and_stays_within_bounds(
    kind: str, total: int, share: float, final: float
) -> None:
    warmup = round(share * total)
    section = schedule(kind=kind, warmup_steps=warmup, final_ratio=final)
    rates = [lr_factor(section, total, step) for step in range(total)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= final - 1e-12 for rate in rates[warmup:])
    assert rates[max(warmup - 1, 0)] == 1.0
