"""Iterations on the clock: rounds of calls, the optimizer step, and what may overlap.

sync        calls of iteration t, gradients home, step, calls of iteration t + 1
layerwise   as sync, but layers are updated one by one, and the uploads of iteration t + 1 wait only
            for their own layers. Where calls overlap, a layer is updated once its own gradients are
            home; where they do not, layers are updated upwards once the calls of t have ended
async       calls of iteration t + 1 begin at once; those of t + 2 wait for the step of t
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from roundpipe.plan.clock import PipelineClock, Recorder
from roundpipe.plan.cost_tables import BACKWARD, FORWARD, FUSED, CostTables, StageStep
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.workload import Workload

_SETTLED = 1e-9


class IterationRecorder(Recorder, Protocol):
    """Also hears where iterations and calls begin, and of optimizer steps."""

    def call(self, iteration: int, call: int) -> None:
        """What follows belongs to this call; calls are counted through an iteration."""

    def step(self, iteration: int, begin_ms: float, end_ms: float) -> None:
        """The optimizer worked on the gradients of this iteration."""


@dataclass(frozen=True)
class Schedule:
    """One model's part of an iteration.

    Attributes:
        tables: the model's costs.
        calls: stages of the calls that make a round; a later call of a round waits for the whole
            of the earlier one (forward and user-driven backward).
        rounds: how many rounds make an iteration.
        microbatches: in one round.
        update_ms: optimizer time of each layer.
    """

    tables: CostTables
    calls: tuple[tuple[StageStep, ...], ...]
    rounds: int
    microbatches: int
    update_ms: tuple[float, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        calls: tuple[tuple[StageStep, ...], ...],
        microbatches_per_round: int,
        tables: CostTables | None = None,
    ) -> Schedule:
        """The schedule of a workload under a plan's calls."""
        return cls(
            tables or CostTables.of(workload),
            calls,
            workload.microbatches // microbatches_per_round,
            microbatches_per_round,
            tuple(layer.optimizer_ms for layer in workload.costs.layers),
        )


def calls_of(plan: StagePlan, run_type: str) -> tuple[tuple[StageStep, ...], ...]:
    """The calls of one round, as they are dispatched."""
    forward = tuple(
        StageStep(FORWARD, stage.start, stage.stop, replicas)
        for stage, replicas in zip(plan.fwd_plan, plan.fwd_replicas, strict=True)
    )
    if run_type == "infer":
        return (forward,)
    fused = FUSED if run_type == "fused" else BACKWARD
    backward = tuple(
        StageStep(fused if index == 0 else BACKWARD, stage.start, stage.stop, replicas)
        for index, (stage, replicas) in enumerate(
            zip(plan.bwd_plan, plan.bwd_replicas, strict=True)
        )
    )
    return (forward + backward,) if run_type == "fused" else (forward, backward)


class IterationClock:
    """Runs iterations of one or several models, one after another in every iteration.

    Args:
        workload: machine, mode, rules and run type; the same for all models.
        schedules: what each model runs.
        recorder: told about everything.

    Attributes:
        ends_ms: end of each iteration so far: its last stage and download, and in ``sync`` mode
            its step.
    """

    def __init__(
        self,
        workload: Workload,
        schedules: Sequence[Schedule],
        recorder: IterationRecorder | None = None,
    ) -> None:
        self.ends_ms: list[float] = []
        self._has_step = workload.run_type != "infer"
        self._overlap = workload.rules.overlap_calls
        self._is_layerwise = workload.mode == "layerwise" and self._has_step
        self._is_early = self._is_layerwise and self._overlap
        self.clock = PipelineClock(workload.machine, recorder, by_layer=self._is_early)
        self._is_uniform = workload.machine.is_uniform
        self._mode = workload.mode
        self._schedules = schedules
        self._recorder = recorder
        self._step_end = 0.0
        self._step_ends: list[float] = []
        self._updated: list[list[float]] = [[0.0] * len(s.update_ms) for s in schedules]

    @property
    def step_ms(self) -> float:
        """Time of a whole optimizer step."""
        return (
            sum(sum(schedule.update_ms) for schedule in self._schedules) if self._has_step else 0.0
        )

    def state(self) -> tuple[int, list[float]]:
        """All that the future depends on: whose turn it is, and what will be waited for.

        Times are relative to the first moment at which a device is free that was ever used; what
        lies before it delays nothing any more, and a device that was never used says so. On a
        uniform machine any device's turn is like any other's.
        """
        now = min((time for time in self.clock.free if time > 0), default=0.0)
        times = [*self.clock.state(), self._step_end, self._step_ends[0]]
        for updated in self._updated if self._is_layerwise else ():
            times += updated
        if self._mode == "sync":
            times.append(self.ends_ms[-1])
        cursor = 0 if self._is_uniform else self.clock.cursor
        return cursor, [max(time - now, 0.0) if time > 0 else -1.0 for time in times]

    def run_iteration(self) -> float:
        """Run one more iteration; returns its end."""
        call_number = 0
        for model, schedule in enumerate(self._schedules):
            if self._is_early:
                self.clock.homecomings = []
            for _ in range(schedule.rounds):
                for index, steps in enumerate(schedule.calls):
                    if self._recorder is not None:
                        self._recorder.call(len(self.ends_ms), call_number)
                    published = self._published(model, waits=index > 0)
                    self.clock.run_call(schedule.tables, steps, schedule.microbatches, published)
                    call_number += 1
            if self._is_early:
                self._update_early(model, schedule)
        end = self.clock.now
        if self._is_layerwise:
            if not self._is_early:
                self._update_upwards(end)
        elif self._has_step:
            self._step(end, self.step_ms)
            if self._mode == "sync":
                end = self._step_end
        self._step_ends = [*self._step_ends[-1:], self._step_end]
        self.ends_ms.append(end)
        return end

    def _published(self, model: int, *, waits: bool) -> float | list[float]:
        """From when a call may read the parameters."""
        gate = self.clock.now if waits or not self._overlap else 0.0
        if self._is_layerwise:
            return [max(gate, updated) for updated in self._updated[model]]
        if self._mode == "sync":
            return max(gate, self.ends_ms[-1]) if self.ends_ms else gate
        return max(gate, self._step_ends[0]) if len(self._step_ends) > 1 else gate

    def _step(self, ready: float, duration: float) -> None:
        begin = max(ready, self._step_end)
        self._step_end = begin + duration
        if self._recorder is not None and duration > 0:
            self._recorder.step(len(self.ends_ms), begin, self._step_end)

    def _update_upwards(self, ready: float) -> None:
        """Update all layers one after another, in the order in which the next call needs them."""
        for updated, schedule in zip(self._updated, self._schedules, strict=True):
            for layer, duration in enumerate(schedule.update_ms):
                self._step(ready, duration)
                updated[layer] = self._step_end

    def _update_early(self, model: int, schedule: Schedule) -> None:
        """Update each layer once its gradients are home, one after another."""
        home: dict[int, float] = {}
        for end, start, stop in self.clock.homecomings or ():
            for layer in range(start, stop):
                home[layer] = max(home.get(layer, 0.0), end)
        for layer in sorted(home, key=lambda layer: (home[layer], -layer)):
            self._step(home[layer], schedule.update_ms[layer])
            self._updated[model][layer] = self._step_end


class Pace(NamedTuple):
    """How fast iterations follow each other.

    Attributes:
        iteration_ms: time of one iteration; the mean, where iterations differ.
        iterations: how many were run to find out.
        is_exact: whether they were seen to repeat; otherwise it is the mean of late ones.
    """

    iteration_ms: float
    iterations: int
    is_exact: bool


def pace_of(
    workload: Workload,
    schedules: Sequence[Schedule],
    *,
    patience: int = 12,
    hopeless_ms: float = math.inf,
) -> Pace:
    """Time of an iteration: of one, or, where iterations overlap, the pace of many in a row.

    Devices take turns, so iterations begin at different devices. On a uniform machine in ``sync``
    mode that changes nothing and one iteration tells all. Otherwise iterations are run until the
    clock's state repeats, apart from a shift in time and, on a uniform machine, a turn of the
    devices. From then on everything repeats, so the mean over that period is exact.

    Args:
        workload: machine, mode, rules and run type.
        schedules: what each model runs.
        patience: after ``patience`` iterations per device, take the mean of the later half.
        hopeless_ms: give up when a few iterations took longer than this on average.
    """
    run = IterationClock(workload, schedules)
    first = run.run_iteration()
    if workload.machine.is_uniform:
        if workload.mode == "sync":
            return Pace(first, 1, True)
        if workload.mode == "async" and not workload.rules.overlap_calls:
            # Call t + 2 waits for step t: whichever of calls and steps takes longer sets the pace.
            return Pace(max(first, run.step_ms), 1, True)
        if workload.mode == "layerwise" and not workload.rules.overlap_calls:
            # When calls have ended nothing is left but the updates: from then on all is alike.
            return Pace(run.run_iteration() - first, 2, True)
    devices = len(workload.machine)
    few = max(3, devices // 2)
    states = [run.state()]
    while len(states) < patience * devices:
        run.run_iteration()
        state = run.state()
        for period, earlier in enumerate(reversed(states[-devices:]), start=1):
            if _is_same(state, earlier):
                mean = (run.ends_ms[-1] - run.ends_ms[-1 - period]) / period
                return Pace(mean, len(run.ends_ms), True)
        states.append(state)
        if len(states) > few:
            recent = (run.ends_ms[-1] - run.ends_ms[-1 - few]) / few
            if recent > hopeless_ms:
                return Pace(recent, len(run.ends_ms), False)
    half = len(run.ends_ms) // 2 // devices * devices
    mean = (run.ends_ms[-1] - run.ends_ms[-1 - half]) / half
    return Pace(mean, len(run.ends_ms), False)


def _is_same(state: tuple[int, list[float]], other: tuple[int, list[float]]) -> bool:
    bound = _SETTLED * max(1.0, *state[1])
    return state[0] == other[0] and all(
        abs(a - b) <= bound for a, b in zip(state[1], other[1], strict=True)
    )
