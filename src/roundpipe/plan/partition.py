"""Cutting a row of layers into contiguous stages whose heaviest stage is as light as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_BISECTIONS = 60


def prefix_sums(costs: Sequence[float]) -> list[float]:
    """Sums of the first 0, 1, ... ``len(costs)`` costs."""
    return [0.0, *accumulate(float(cost) for cost in costs)]


def fill_stages(prefix: Sequence[float], bound: float) -> list[int]:
    """Cut so that each stage takes as many layers as ``bound`` allows, and at least one.

    Args:
        prefix: sums as :func:`prefix_sums` gives them.
        bound: the most a stage may cost; a layer above it gets a stage of its own.

    Returns:
        The cuts, from 0 to the number of layers; as few stages as the bound allows.
    """
    layers = len(prefix) - 1
    cuts = [0]
    while cuts[-1] < layers:
        start = cuts[-1]
        end = bisect_right(prefix, prefix[start] + bound * (1 + 1e-12), start + 1) - 1
        cuts.append(max(end, start + 1))
    return cuts


def smallest_bound(prefix: Sequence[float], stages: int) -> float:
    """The least cost that the heaviest of at most ``stages`` contiguous stages can have.

    Found by bisection over the bound; :func:`fill_stages` decides whether a bound is enough.
    """
    layers = len(prefix) - 1
    heaviest = max((prefix[i + 1] - prefix[i] for i in range(layers)), default=0.0)
    low = max(heaviest, prefix[-1] / max(stages, 1))
    if len(fill_stages(prefix, low)) - 1 <= stages:
        return low
    high = prefix[-1]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if len(fill_stages(prefix, middle)) - 1 <= stages:
            high = middle
        else:
            low = middle
    return high


def balanced_stages(costs: Sequence[float], stages: int, limit: float | None = None) -> list[range]:
    """Exactly ``stages`` contiguous stages, the heaviest as light as possible, the rest even.

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
    prefix = prefix_sums(costs)
    count = min(max(stages, 1), layers)
    if limit is not None:
        count = max(count, len(fill_stages(prefix, limit)) - 1)
    bound = smallest_bound(prefix, count)
    if limit is not None:
        bound = min(bound, limit)
    return _spread(prefix, count, bound)


def _spread(prefix: Sequence[float], count: int, bound: float) -> list[range]:
    """``count`` stages under ``bound``, each as near as it can be to an even share of the rest."""
    layers = len(prefix) - 1
    needed = _stages_needed(prefix, bound)
    result: list[range] = []
    start = 0
    for left in range(count, 0, -1):
        if left == 1:
            end = layers
        else:
            share = (prefix[layers] - prefix[start]) / left
            most = max(
                bisect_right(prefix, prefix[start] + bound * (1 + 1e-12), start + 1) - 1, start + 1
            )
            allowed = range(start + 1, min(most, layers - left + 1) + 1)
            ends = [end for end in allowed if needed[end] <= left - 1]
            end = min(ends, key=lambda end: (abs(prefix[end] - prefix[start] - share), end))
        result.append(range(start, end))
        start = end
    return result


def _stages_needed(prefix: Sequence[float], bound: float) -> list[int]:
    """For each layer, how few stages under ``bound`` the layers from it to the end need."""
    layers = len(prefix) - 1
    needed = [0] * (layers + 1)
    for start in range(layers - 1, -1, -1):
        end = bisect_right(prefix, prefix[start] + bound * (1 + 1e-12), start + 1) - 1
        needed[start] = needed[max(end, start + 1)] + 1
    return needed
