"""A model's costs as running sums, so that any stage's time is one subtraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from roundpipe.plan.partition import running_sums
from roundpipe.plan.workload import Workload

FORWARD, FUSED, BACKWARD = 0, 1, 2
PHASES = ("forward", "fused", "backward")

Sums = list[float]
"""Sums of the first 0, 1, ... layers' numbers."""


class StageStep(NamedTuple):
    """A stage as it is dispatched: phase, layers ``start`` to ``stop`` - 1, number of replicas."""

    phase: int
    start: int
    stop: int
    replicas: int = 1


@dataclass(frozen=True)
class CostTables:
    """Running sums over the layers; speeds of devices are applied.

    Attributes:
        early: ``early[phase][device]``: work that may start before the input is there.
        main: ``main[phase][device]``: the other work.
        weights: bytes to upload.
        gradients: bytes to download.
        stage_ms: of every stage on every microbatch, besides its layers.
    """

    early: tuple[list[Sums], ...]
    main: tuple[list[Sums], ...]
    weights: Sums
    gradients: Sums
    stage_ms: float = 0.0

    @classmethod
    def of(cls, workload: Workload) -> CostTables:
        """The tables of a workload."""
        rules = workload.rules
        nothing = [0.0] * (len(workload.costs) + 1)
        early: tuple[list[Sums], ...] = ([], [], [])
        main: tuple[list[Sums], ...] = ([], [], [])
        for index, device in enumerate(workload.machine.devices):
            layers, speed = workload.costs_on(index).layers, device.speed
            forward = [layer.forward_ms / speed for layer in layers]
            recompute = [layer.again_ms / speed for layer in layers]
            backward = [layer.backward_ms / speed for layer in layers]
            first_part = (None, forward, recompute)
            is_early = (False, rules.early_fused_forward, rules.early_recompute)
            for phase, second_part in enumerate((forward, backward, backward)):
                first = first_part[phase]
                if first is None or is_early[phase]:
                    early[phase].append(nothing if first is None else running_sums(first))
                    main[phase].append(running_sums(second_part))
                else:
                    whole = [a + b for a, b in zip(first, second_part, strict=True)]
                    early[phase].append(nothing)
                    main[phase].append(running_sums(whole))
        layers = workload.costs.layers
        return cls(
            early,
            main,
            running_sums([layer.weight_bytes for layer in layers]),
            running_sums([layer.gradient_bytes for layer in layers]),
            workload.machine.stage_ms,
        )

    def times(self, step: StageStep, device: int) -> tuple[float, float]:
        """What may start before the input is there, and what may not, in ms per microbatch."""
        phase, start, stop, _ = step
        early, main = self.early[phase][device], self.main[phase][device]
        return early[stop] - early[start], main[stop] - main[start] + self.stage_ms
