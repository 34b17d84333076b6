"""Plans that nobody gave: made from what is known, renewed between calls when that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.costs import ModelCosts, PlanBook, RunSamples
from roundpipe.costs.notes import LayerSample
from roundpipe.devices import CpuChecks, DevicePool, open_cpu_pool
from roundpipe.errors import InvalidValueError

LAYERS = 6


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    with open_cpu_pool(2) as opened:
        yield opened


def book_of(pool: DevicePool, shared: Sequence[frozenset[int]] = ()) -> PlanBook:
    layers = [nn.Linear(16, 16) for _ in range(LAYERS)]
    return PlanBook(layers, pool.devices, "net", shared)


def measure(book: PlanBook, times_ms: Sequence[float], runs: int = 1) -> None:
    """Runs in which forward and recompute took so long, and backward twice as long."""
    for _ in range(runs):
        record = book.meter.open_run(True, devices=1)
        record.add(
            RunSamples(
                [
                    LayerSample(what, layer, microbatch, factor * time_ms)
                    for layer, time_ms in enumerate(times_ms)
                    for microbatch in range(2)
                    for what, factor in (("forward", 1), ("recompute", 1), ("backward", 2))
                ]
            )
        )
    book.meter.settle()


HEAVY_FIRST = [30.0, *[1.0] * (LAYERS - 1)]


def test_a_plan_stays_until_measurements_say_that_another_is_faster(pool: DevicePool) -> None:
    book = book_of(pool)
    first = book.plan("fused", 4)
    assert book.plan("fused", 4) is first

    measure(book, HEAVY_FIRST, runs=2)
    second = book.plan("fused", 4)

    assert second != first
    second.check_valid(LAYERS, "fused")
    assert max(len(stage) for stage in second.bwd_plan if 0 in stage) == 1  # on its own
    assert not second.is_wide


def test_a_plan_that_is_as_good_stays(pool: DevicePool) -> None:
    book = book_of(pool)
    measure(book, [5.0] * LAYERS, runs=2)
    first = book.plan("fused", 4)
    measure(book, [5.1, *[5.0] * (LAYERS - 1)], runs=30)
    assert book.plan("fused", 4) is first


def test_plans_are_looked_at_ever_less_often(pool: DevicePool) -> None:
    book = book_of(pool)
    book.plan("fused", 4)
    measure(book, [5.0] * LAYERS, runs=4)
    steady = book.plan("fused", 4)
    measure(book, HEAVY_FIRST, runs=3)  # 7 runs: the next look is after 8
    assert book.plan("fused", 4) is steady


def test_the_same_measurements_give_the_same_plans(pool: DevicePool) -> None:
    plans = []
    for _ in range(2):
        book = book_of(pool)
        book.plan("fused", 3)
        measure(book, [1.0, 7.0, 2.0, 3.0, 9.0, 1.5], runs=2)
        plans.append([book.plan(run_type, 3) for run_type in ("fused", "train", "infer")])
    assert plans[0] == plans[1]


def test_a_new_plan_never_changes_the_order_in_which_tied_gradients_are_summed(
    pool: DevicePool,
) -> None:
    def togetherness(plan: ModelExecutePlan) -> bool:
        return any({0, 1} <= set(stage) for stage in plan.bwd_plan)

    free, tied = book_of(pool), book_of(pool, [frozenset({0, 1}), frozenset({3})])
    together = togetherness(tied.plan("fused", 4))
    # Layers 0 and 1 in one stage are far too slow, or far too cheap to be apart.
    times = [30.0, 30.0, 1.0, 1.0, 1.0, 1.0] if together else [0.01, 0.01, 1.0, 30.0, 30.0, 30.0]
    for book in (free, tied):
        book.plan("fused", 4)
        measure(book, times, runs=2)
    assert togetherness(free.plan("fused", 4)) != together
    assert togetherness(tied.plan("fused", 4)) == together


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_a_limit_that_nothing_keeps_to_leaves_the_plan_as_it_was(run_type: str) -> None:
    with open_cpu_pool(1, CpuChecks(limit_bytes=100)) as pool:
        book = book_of(pool)
        first = book.plan(run_type, 2)
        measure(book, [5.0] * LAYERS, runs=2)
        assert book.plan(run_type, 2) is first


def test_loaded_costs_give_the_first_plan(pool: DevicePool, tmp_path: Path) -> None:
    known = book_of(pool)
    known.plan("fused", 4)
    measure(known, HEAVY_FIRST, runs=2)
    known.costs().save(tmp_path / "costs.json")

    fresh = book_of(pool)
    fresh.load(ModelCosts.load(tmp_path / "costs.json"))

    assert fresh.costs().source == "loaded"
    assert fresh.plan("fused", 4) == known.plan("fused", 4)
    measure(fresh, [5.0] * LAYERS, runs=2)
    assert fresh.costs().source == "measured"


def test_in_a_model_costs_are_estimated_then_measured_and_a_new_run_begins_with_them(
    tmp_path: Path,
) -> None:
    x = torch.randn(6, 16)
    config = RoundPipeRunConfig(num_microbatch=3)

    def wrap() -> RoundPipe:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))
        return RoundPipe(model, devices="cpu:2", model_run_config=config)

    with wrap() as first:
        assert first.costs().source == "estimated"
        losses = [first.forward_backward((x,), loss_fn=lambda o, _: o.sum()) for _ in range(9)]
        assert first.costs().source == "measured"
        first.costs().save(tmp_path / "costs.json")
    with wrap() as second:
        second.load_costs(tmp_path / "costs.json")
        assert second.costs().source == "loaded"
        assert second.plan_costs().layers == second.costs().layers.layers
        plan = ModelExecutePlan.auto("fused", second)
        plan.check_valid(LAYERS, "fused")
        again = second.forward_backward((x,), loss_fn=lambda o, _: o.sum())
    assert torch.equal(torch.stack(losses), again.expand(9))  # whatever the plans were

    with RoundPipe(nn.Linear(16, 16), devices="cpu:2") as other:
        with pytest.raises(InvalidValueError, match="these costs have 6 layers and the model has"):
            other.load_costs(tmp_path / "costs.json")
