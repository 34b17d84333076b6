"""The plans there are for a workload: how they are written down, and which are legal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from roundpipe.plan.cost_tables import BACKWARD, FORWARD, FUSED, CostTables, StageStep
from roundpipe.plan.iterations import Schedule
from roundpipe.plan.memory import MemoryNeed, memory_needs, stage_bytes
from roundpipe.plan.partition import running_sums
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.workload import PlanLimits, Workload

_DOMINATES = 0.9


class Cut(NamedTuple):
    """A plan, written so that neighbours are easy to make.

    Attributes:
        forward: bounds of the forward stages, from 0 to the last forward layer + 1; ``(0,)`` when
            the fused stage has every layer.
        backward: bounds of the backward stages, ascending; empty for ``"infer"``.
        widths: replicas of the forward and of the backward stage of each heavy layer in turn.
        per_round: microbatches in a round.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    widths: tuple[int, ...]
    per_round: int


class PlanSpace:
    """The legal plans of one workload.

    Args:
        workload: what is to be planned.
        limits: what plans must keep to.

    Attributes:
        heavy: layers that may get a wide stage, ascending.
        max_width: most replicas of a stage.
        speeds: how fast each device is, compared with the fastest.
    """

    def __init__(self, workload: Workload, limits: PlanLimits) -> None:
        self.workload = workload
        self.limits = limits
        self.layers = len(workload.costs)
        self.has_backward = workload.run_type != "infer"
        self.is_fused = workload.run_type == "fused"
        self.max_width = min(len(workload.machine), limits.max_replicas or len(workload.machine))
        heavy = sorted(limits.heavy(workload.costs)) if self.max_width > 1 else []
        self.heavy = tuple(layer for layer in heavy if 0 <= layer < self.layers)
        layers = workload.costs.layers
        self.tables = CostTables.of(workload)
        self.speeds = _speeds(self.tables)
        self._forward = running_sums([layer.forward_ms for layer in layers])
        self._fused = running_sums([layer.forward_ms + layer.backward_ms for layer in layers])
        self._backward = running_sums([layer.again_ms + layer.backward_ms for layer in layers])
        self._weights = running_sums([layer.weight_bytes for layer in layers])
        self._both = running_sums([layer.weight_bytes + layer.gradient_bytes for layer in layers])
        memories = [device.memory_bytes for device in workload.machine.devices]
        self._smallest_memory = min((size for size in memories if size is not None), default=None)
        self._stage_is_legal = lru_cache(maxsize=None)(self._check_stage)

    def stage_ms(self, phase: int, start: int, stop: int) -> float:
        """Time of a stage for one microbatch, on a device of speed 1."""
        sums = (self._forward, self._fused, self._backward)[phase]
        return sums[stop] - sums[start]

    def calls(self, cut: Cut) -> tuple[tuple[StageStep, ...], ...]:
        """The calls of one round of a plan."""
        forward = [StageStep(FORWARD, start, stop) for start, stop in pairwise(cut.forward)]
        if not self.has_backward:
            self._widen(forward, cut, 0)
            return (tuple(forward),)
        bounds = cut.backward
        backward = [StageStep(BACKWARD, start, stop) for start, stop in pairwise(bounds)]
        if self.is_fused:
            backward[-1] = StageStep(FUSED, bounds[-2], bounds[-1])
        if self.heavy:
            self._widen(forward, cut, 0)
            self._widen(backward, cut, 1)
        backward.reverse()
        if self.is_fused:
            return ((*forward, *backward),)
        return (tuple(forward), tuple(backward))

    def steps(self, cut: Cut) -> list[StageStep]:
        """All stages of a round, in dispatch order."""
        return [step for call in self.calls(cut) for step in call]

    def _widen(self, steps: list[StageStep], cut: Cut, offset: int) -> None:
        """Give the stages of heavy layers their replicas."""
        bounds = cut.backward if offset else cut.forward
        for index, layer in enumerate(self.heavy):
            width = cut.widths[2 * index + offset]
            if width == 1 or layer >= bounds[-1]:
                continue
            place = bisect_right(bounds, layer) - 1
            step = steps[place]
            own = self.stage_ms(step.phase, layer, layer + 1)
            if own >= _DOMINATES * self.stage_ms(step.phase, step.start, step.stop):
                steps[place] = step._replace(replicas=width)

    def plan(self, cut: Cut) -> StagePlan:
        """The plan as a record."""
        steps = self.steps(cut)
        forward = [step for step in steps if step.phase == FORWARD]
        backward = [step for step in steps if step.phase != FORWARD]
        return StagePlan(
            [range(step.start, step.stop) for step in forward],
            [range(step.start, step.stop) for step in backward],
            [step.replicas for step in forward],
            [step.replicas for step in backward],
        )

    def schedule(self, cut: Cut) -> Schedule:
        """What the engine would run."""
        return Schedule.of(self.workload, self.calls(cut), cut.per_round, self.tables)

    # --- limits ------------------------------------------------------------------------------

    def is_legal(self, cut: Cut) -> bool:
        """Whether a plan keeps to the limits and fits the devices."""
        legal = self._stage_is_legal
        if not all(legal(FORWARD, a, b) for a, b in pairwise(cut.forward)):
            return False
        if self.has_backward:
            bounds = cut.backward
            last = FUSED if self.is_fused else BACKWARD
            if not legal(last, bounds[-2], bounds[-1]):
                return False
            if not all(legal(BACKWARD, a, b) for a, b in pairwise(bounds[:-1])):
                return False
        if not self._has_enough_stages(cut):
            return False
        return self._smallest_memory is None or all(
            need.excess_bytes <= 0 for need in self.memory(self.steps(cut))
        )

    def memory(self, steps: Sequence[StageStep]) -> list[MemoryNeed]:
        """The fullest moment of each device with a limit, when these stages make a round."""
        machine = self.workload.machine
        repeats = 1
        if self.workload.rules.overlap_calls:
            repeats = 2 if machine.is_uniform else len(machine) + 1
        return memory_needs(machine, self.workload.costs, steps, repeats)

    def stage_is_lean(self, phase: int, start: int, stop: int) -> bool:
        """Whether a stage keeps to its limits and two like it fit the smallest device."""
        if not self._stage_is_legal(phase, start, stop):
            return False
        if self._smallest_memory is None:
            return True
        size = stage_bytes(self.workload.costs.layers, StageStep(phase, start, stop))
        return 2 * (size.weights + size.gradients) + size.activations <= self._smallest_memory

    def _has_enough_stages(self, cut: Cut) -> bool:
        forward, backward = len(cut.forward) - 1, max(len(cut.backward) - 1, 0)
        if self.is_fused:
            return forward + backward >= min(self.limits.min_stages, 2 * self.layers - 1)
        fewest = min(self.limits.min_stages, self.layers)
        return forward >= fewest and (not self.has_backward or backward >= fewest)

    def _check_stage(self, phase: int, start: int, stop: int) -> bool:
        limits, count = self.limits, stop - start
        most = (limits.forward_layers, limits.fused_layers, limits.backward_layers)[phase]
        if most is not None and count > most:
            return False
        if count == 1:
            return True
        sums = self._weights if phase == FORWARD else self._both
        if limits.stage_bytes is not None and sums[stop] - sums[start] > limits.stage_bytes:
            return False
        return limits.stage_ms is None or self.stage_ms(phase, start, stop) <= limits.stage_ms


def _speeds(tables: CostTables) -> list[float]:
    """How fast each device goes through all layers, compared with the fastest."""
    times = [
        tables.early[BACKWARD][device][-1] + tables.main[BACKWARD][device][-1] + forward[-1]
        for device, forward in enumerate(tables.main[FORWARD])
    ]
    return [min(times) / time if time else 1.0 for time in times]
