"""Cutting a row of layers into contiguous stages whose heaviest stage is as light as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

_ROUNDING = 1 + 1e-12
_BISECTIONS = 40


def running_sums(values: Sequence[float]) -> list[float]:
    """Sums of the first 0, 1, ... values."""
    return [0.0, *accumulate(float(value) for value in values)]


def fill_stages(sums: Sequence[float], bound: float) -> list[int]:
    """Cut so that each stage takes as many layers as ``bound`` allows, and at least one.

    Args:
        sums: as :func:`running_sums` gives them.
        bound: the most a stage may cost; a layer above it gets a stage of its own.

    Returns:
        The cuts, from 0 to the number of layers; as few stages as the bound allows.
    """
    layers = len(sums) - 1
    cuts = [0]
    while cuts[-1] < layers:
        cuts.append(_last_end(sums, cuts[-1], bound))
    return cuts


def smallest_bound(sums: Sequence[float], stages: int) -> float:
    """The least cost that the heaviest of at most ``stages`` contiguous stages can have.

    Bisection over the bound, in which :func:`fill_stages` decides whether a bound is enough. Each
    answer moves a limit to a cost that some stage really has, so few steps are needed.
    """
    layers = len(sums) - 1
    heaviest = max((sums[i + 1] - sums[i] for i in range(layers)), default=0.0)
    low = max(heaviest, sums[-1] / max(stages, 1))
    high = sums[-1]
    trial = low
    while low < high:
        cuts = fill_stages(sums, trial)
        costs = [sums[b] - sums[a] for a, b in pairwise(cuts)]
        if len(costs) <= stages:
            high = max(costs)
            if trial == low:
                break
        else:
            # No stage grows before the bound reaches its cost with the next layer.
            low = min(sums[b + 1] - sums[a] for a, b in pairwise(cuts[:-1]))
        trial = low if low * _ROUNDING >= high else (low + high) / 2
    return high


def balanced_stages(costs: Sequence[float], stages: int, limit: float | None = None) -> list[range]:
    """Exactly ``stages`` contiguous stages, the heaviest as light as possible, the rest even.

    Where they cannot be equal the lighter ones come first: a pipeline fills sooner so.

    Args:
        costs: one non-negative cost per layer, in any unit.
        stages: how many stages; fewer when there are fewer layers, more when ``limit`` asks for it.
        limit: the most a stage may cost, in the same unit; only a stage of one layer may exceed it.

    Returns:
        The stages in ascending order; together they cover every layer once.
    """
    layers = len(costs)
    if layers == 0:
        return []
    sums = running_sums(costs)
    count = min(max(stages, 1), layers)
    if limit is not None:
        count = max(count, len(fill_stages(sums, limit)) - 1)
    bound = smallest_bound(sums, count)
    if limit is not None:
        bound = min(bound, limit)
    return _spread(sums, count, bound)


def fitted_stages(costs: Sequence[float], speeds: Sequence[float]) -> list[range]:
    """One stage for each speed, so that all take about equally long.

    Stages are filled in turn under the least bound that is enough. That is the best there is unless
    a stage must take a layer that alone is above the bound.

    Args:
        costs: one non-negative cost per layer, in any unit.
        speeds: how fast each stage is worked on; at most as many as there are layers.

    Returns:
        The stages in ascending order; together they cover every layer once.
    """
    sums = running_sums(costs)
    low, high = 0.0, sums[-1] / min(speeds)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _fit(sums, speeds, middle)[-1] == len(costs):
            high = middle
        else:
            low = middle
    ends = _fit(sums, speeds, high)
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _fit(sums: Sequence[float], speeds: Sequence[float], bound: float) -> list[int]:
    """Ends of stages that each take at most ``bound``, and at least one layer."""
    layers = len(sums) - 1
    ends: list[int] = []
    start = 0
    for left, speed in zip(range(len(speeds) - 1, -1, -1), speeds, strict=True):
        start = min(_last_end(sums, start, bound * speed), layers - left)
        ends.append(start)
    return ends


def _spread(sums: Sequence[float], count: int, bound: float) -> list[range]:
    """``count`` stages under ``bound``, each at most an even share of the rest where it can be."""
    layers = len(sums) - 1
    needed = [0] * (layers + 1)
    for start in range(layers - 1, -1, -1):
        needed[start] = needed[_last_end(sums, start, bound)] + 1
    result: list[range] = []
    start = 0
    for left in range(count, 1, -1):
        share = (sums[layers] - sums[start]) / left
        end = min(_last_end(sums, start, min(share, bound)), layers - left + 1)
        while needed[end] > left - 1:
            end += 1
        result.append(range(start, end))
        start = end
    return [*result, range(start, layers)]


def _last_end(sums: Sequence[float], start: int, bound: float) -> int:
    """End of the longest stage from ``start`` under ``bound``; at least one layer."""
    return max(bisect_right(sums, sums[start] + bound * _ROUNDING, start + 1) - 1, start + 1)
