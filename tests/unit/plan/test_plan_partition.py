"""Cutting layers into stages: against every way to do it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.plan.partition import balanced_stages, fitted_stages

costs = st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=7)


def every_cut(layers: int, count: int) -> list[list[range]]:
    return [
        [range(start, stop) for start, stop in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), count - 1)
    ]


def total(costs: list[float], stage: range) -> float:
    return sum(costs[layer] for layer in stage)


@given(costs, st.integers(1, 9))
def test_the_heaviest_stage_is_as_light_as_it_can_be(costs: list[float], count: int) -> None:
    count = min(count, len(costs))

    stages = balanced_stages(costs, count)

    assert len(stages) == count
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    best = min(max(total(costs, stage) for stage in cut) for cut in every_cut(len(costs), count))
    assert max(total(costs, stage) for stage in stages) == pytest.approx(best)


@given(costs, st.integers(1, 9), st.sampled_from([0.5, 2.0, 6.0]))
def test_only_a_single_layer_is_above_the_limit(
    costs: list[float], count: int, limit: float
) -> None:
    stages = balanced_stages(costs, count, limit)

    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(len(stage) == 1 or total(costs, stage) <= limit + 1e-9 for stage in stages)


@given(costs, st.data())
def test_fitted_stages_cover_every_layer_once(costs: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=count, max_size=count))

    stages = fitted_stages(costs, speeds)

    assert len(stages) == count
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(len(stage) > 0 for stage in stages)


def test_stages_are_as_long_as_their_device_is_fast() -> None:
    stages = fitted_stages([1.0] * 10, [1.0, 0.5, 1.0])

    assert [len(stage) for stage in stages] == [4, 2, 4]


def test_lighter_stages_come_first() -> None:
    assert [len(stage) for stage in balanced_stages([1.0] * 7, 4)] == [1, 2, 2, 2]


def test_no_layers_make_no_stages() -> None:
    assert balanced_stages([], 3) == []
