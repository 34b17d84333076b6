"""Stages from nothing but layer sizes: what runs before there are measurements."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe.errors import InvalidValueError
from roundpipe.plan.partition import balanced_stages
from roundpipe.plan.stage_plan import check_run_type

_BACKWARD_FACTOR = 3.0
"""Recompute and backward of a layer take about three times its forward (one, and two)."""


def default_stages(
    run_type: str, layer_sizes: Sequence[int], num_devices: int, stage_limit: int | None
) -> tuple[list[range], list[range]]:
    """Forward stages (ascending) and backward stages (descending) balanced by layer size.

    Arguments and errors as in ``default_plan``.
    """
    check_run_type(run_type)
    if num_devices < 1:
        raise InvalidValueError(f"got num_devices={num_devices}; expected at least 1")
    if not layer_sizes:
        raise InvalidValueError("got no layers; a plan needs at least one")
    if min(layer_sizes) < 0:
        layer = next(i for i, size in enumerate(layer_sizes) if size < 0)
        raise InvalidValueError(
            f"layer {layer} has size {layer_sizes[layer]} bytes; sizes cannot be negative"
        )
    if stage_limit is not None and stage_limit < 1:
        raise InvalidValueError(f"got stage_limit={stage_limit} bytes; expected at least 1 or None")
    costs = [float(max(size, 1)) for size in layer_sizes]
    limit = None if stage_limit is None else float(stage_limit)
    if run_type == "fused":
        return _fused_stages(costs, num_devices, limit)
    # Two stages are the least that lets one upload hide behind the other's compute.
    forward = balanced_stages(costs, max(num_devices, 2), limit)
    if run_type == "infer":
        return forward, []
    stages = round(_BACKWARD_FACTOR * len(forward))
    return forward, balanced_stages(costs, stages, limit)[::-1]


def _fused_stages(
    costs: Sequence[float], num_devices: int, limit: float | None
) -> tuple[list[range], list[range]]:
    """The coarsest stages of even time that give each device two of them, a call."""
    layers = len(costs)
    for count in range(1, layers + 1):
        backward = balanced_stages(costs, count, limit)[::-1]
        heaviest = max(sum(costs[i] for i in stage) for stage in backward)
        forward_costs = costs[: backward[0].start]
        bound = _BACKWARD_FACTOR * heaviest
        forward = _forward_under(forward_costs, bound if limit is None else min(bound, limit))
        if len(forward) + len(backward) >= 2 * num_devices:
            break
    return forward, backward


def _forward_under(costs: Sequence[float], bound: float) -> list[range]:
    """As few balanced stages as ``bound`` allows; none for no layers."""
    return balanced_stages(costs, 1, bound)
