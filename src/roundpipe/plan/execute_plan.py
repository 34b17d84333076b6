"""The plan that the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.plan.defaults import default_stages
from roundpipe.plan.stage_plan import StagePlan


@dataclass(frozen=True)
class ModelExecutePlan(StagePlan):
    """Which layers form a stage, in dispatch order, and on how many devices each stage runs."""


def default_plan(
    run_type: str,
    layer_sizes: Sequence[int],
    num_devices: int,
    *,
    stage_limit: int | None = None,
) -> ModelExecutePlan:
    """A sound plan from layer sizes alone, for the time before there are measurements.

    Time is taken to be proportional to size, backward with recompute to three times forward.
    Stages are contiguous and even; there are at least ``num_devices`` of them when there are
    enough layers. The same arguments give the same plan.

    Args:
        run_type: ``"infer"``, ``"train"`` or ``"fused"``.
        layer_sizes: bytes of each layer's parameters and buffers; 0 is allowed.
        num_devices: how many devices take turns.
        stage_limit: the most bytes a stage may have; only a single layer may be above it.

    Raises:
        InvalidValueError: an unknown run type, no layers, a negative size, fewer than one device
            or a limit below one byte.
    """
    forward, backward = default_stages(run_type, layer_sizes, num_devices, stage_limit)
    return ModelExecutePlan(forward, backward)
