"""The simulator: numbers in, timeline out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.errors import InvalidValueError
from roundpipe.plan.bubbles import BubbleAccount, account_of
from roundpipe.plan.clock import StageRecord
from roundpipe.plan.cost_tables import BACKWARD, PHASES
from roundpipe.plan.iterations import IterationClock, Schedule, calls_of
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.timeline import HOST, Span, Timeline
from roundpipe.plan.workload import Workload, check_count


@dataclass(frozen=True)
class Simulation:
    """What a simulation found.

    Attributes:
        timeline: every stage, transfer and step.
        ends_ms: end of each iteration: its last stage and download and, in ``sync`` mode, its step.
    """

    timeline: Timeline
    ends_ms: tuple[float, ...]

    @property
    def makespan_ms(self) -> float:
        """Time of everything."""
        return self.ends_ms[-1]

    def account(self) -> BubbleAccount:
        """Where the devices' time went, from the start to the end of the last iteration."""
        return account_of(self.timeline, 0.0, self.makespan_ms)


def simulate(
    workload: Workload | Sequence[Workload],
    plan: StagePlan | Sequence[StagePlan],
    *,
    microbatches_per_round: int | Sequence[int] | None = None,
    iterations: int = 1,
    title: str = "",
) -> Simulation:
    """Run a plan in arithmetic.

    Args:
        workload: costs, machine, microbatches and mode; or one for each model that runs in an
            iteration, with the same machine and mode.
        plan: what runs; one for each workload.
        microbatches_per_round: microbatches of a call; one for all models or one for each; None for
            all of the iteration's.
        iterations: how many to run.
        title: for the timeline.

    Raises:
        InvalidValueError: a plan that does not fit its workload, a round that does not divide the
            microbatches, or not as many plans as workloads.
    """
    workloads = [workload] if isinstance(workload, Workload) else list(workload)
    plans = [plan] if isinstance(plan, StagePlan) else list(plan)
    if len(workloads) != len(plans) or not plans:
        raise InvalidValueError(
            f"got {len(plans)} plans for {len(workloads)} workloads; expected one for each"
        )
    check_count("iterations", iterations)
    rounds: Sequence[int | None]
    if microbatches_per_round is None or isinstance(microbatches_per_round, int):
        rounds = [microbatches_per_round] * len(plans)
    else:
        rounds = microbatches_per_round
    if len(rounds) != len(plans):
        raise InvalidValueError(
            f"got {len(rounds)} microbatches_per_round for {len(plans)} plans; expected one each"
        )
    schedules = [schedule_of(*each) for each in zip(workloads, plans, rounds, strict=True)]
    recorder = _SpanRecorder()
    run = IterationClock(workloads[0], schedules, recorder)
    for _ in range(iterations):
        run.run_iteration()
    names = tuple(device.name for device in workloads[0].machine.devices)
    return Simulation(Timeline(names, tuple(recorder.spans), title), tuple(run.ends_ms))


def schedule_of(
    workload: Workload, plan: StagePlan, microbatches_per_round: int | None = None
) -> Schedule:
    """What the engine would run for a plan.

    Raises:
        InvalidValueError: the plan does not fit the workload, or the round does not divide its
            microbatches.
    """
    plan.check_valid(len(workload.costs), workload.run_type)
    per_round = workload.microbatches if microbatches_per_round is None else microbatches_per_round
    check_count("microbatches_per_round", per_round)
    if workload.microbatches % per_round:
        raise InvalidValueError(
            f"microbatches_per_round is {per_round}; expected a divisor of the "
            f"{workload.microbatches} microbatches of an iteration"
        )
    return Schedule.of(workload, calls_of(plan, workload.run_type), per_round)


class _SpanRecorder:
    """Writes down what the clock says."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._iteration = 0
        self._call = 0

    def call(self, iteration: int, call: int) -> None:
        self._iteration, self._call = iteration, call

    def stage(self, record: StageRecord) -> None:
        """Split each microbatch's time into what it waited for and what it computed."""
        kind = PHASES[record.step.phase]
        place = (record.device, self._iteration, self._call, record.position)
        free, early, add = record.begin_ms, record.early_ms, self.spans.append
        layers = range(record.step.start, record.step.stop)
        early_kind = "recompute" if record.step.phase == BACKWARD else "forward"
        for index, end in zip(record.microbatches, record.ends_ms, strict=True):
            if early > 0:
                begin = free
                if record.saved_ms is not None and record.saved_ms[index] > begin:
                    begin = record.saved_ms[index]
                add(Span(early_kind, *place, index, begin, begin + early, layers))
            add(Span(kind, *place, index, end - record.main_ms, end, layers))
            free = end

    def transfer(
        self, kind: str, device: int, position: int, begin_ms: float, end_ms: float
    ) -> None:
        self.spans.append(
            Span(kind, device, self._iteration, self._call, position, -1, begin_ms, end_ms)
        )

    def step(self, iteration: int, begin_ms: float, end_ms: float) -> None:
        self.spans.append(Span("step", HOST, iteration, self._call, -1, -1, begin_ms, end_ms))
