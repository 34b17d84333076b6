"""The planner: numbers in, plan out.

It minimises what the simulator says an iteration takes in the workload's mode: with fill and drain
where iterations follow one another, the pace of many where they overlap. Small models are planned
by trying everything, larger ones by a scan over plans of even stages and small changes to the best
of them. No clock and no chance: the same numbers give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe.errors import InvalidValueError
from roundpipe.plan.bounds import device_loads, least_iteration_ms, least_work_ms
from roundpipe.plan.cost_tables import PHASES
from roundpipe.plan.iterations import calls_of, pace_of
from roundpipe.plan.memory import MemoryNeed
from roundpipe.plan.search import (
    Others,
    Search,
    count_plans,
    improve,
    scan,
    scan_speeds,
    try_every_plan,
)
from roundpipe.plan.seeds import SeedMaker
from roundpipe.plan.space import Cut, PlanSpace
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.workload import PlanLimits, Workload

DEFAULT_EFFORT = 24_000
"""Stages that may be simulated for one plan."""

_FEW = 12_000
_WITHOUT_END = 1 << 60
_LONG = 60
_TURNS = 2
_STARTS = 8


@dataclass(frozen=True)
class Planned:
    """A plan and what the simulator says about it.

    Attributes:
        workload: what was planned.
        limits: what the plan keeps to.
        plan: the stages.
        microbatches_per_round: of the iteration's microbatches; calls of that many each.
        iteration_ms: time of an iteration in the workload's mode.
        bound_ms: a time that no plan can beat.
        busy_ms: computing time of all devices together in an iteration.
        tried: how many plans were compared.
        is_best: whether these were all there are, so that none is faster.
    """

    workload: Workload
    limits: PlanLimits
    plan: StagePlan
    microbatches_per_round: int
    iteration_ms: float
    bound_ms: float
    busy_ms: float
    tried: int
    is_best: bool

    @property
    def bubble_percent(self) -> float:
        """Share of the devices' time in which they do not compute."""
        total = self.iteration_ms * len(self.workload.machine)
        # Sums in another order may be above the whole in the last digits.
        return max(100 * (1 - self.busy_ms / total), 0.0) if total else 0.0


def plan_iteration(
    workload: Workload, limits: PlanLimits | None = None, *, effort: int = DEFAULT_EFFORT
) -> Planned:
    """The fastest plan that the search finds for one model.

    Args:
        workload: costs, machine, microbatches, mode.
        limits: what the plan must keep to.
        effort: how many stages may be simulated; more may find a faster plan.

    Raises:
        InvalidValueError: no plan fits the devices, or the limits contradict each other; the
            message names the layer and the bytes.
    """
    space = PlanSpace(workload, limits or PlanLimits())
    search = _search(space, ((), ()), effort)
    return _planned(space, search, ((), ()))


def memory_of(planned: Planned) -> list[MemoryNeed]:
    """The fullest moment of each device with a limit, under a plan."""
    space = PlanSpace(planned.workload, planned.limits)
    calls = calls_of(planned.plan, planned.workload.run_type)
    return space.memory([step for call in calls for step in call])


def plan_models(
    workloads: Sequence[Workload],
    limits: Sequence[PlanLimits] | PlanLimits | None = None,
    *,
    effort: int = DEFAULT_EFFORT,
) -> list[Planned]:
    """Plans for several models that run one after another in every iteration.

    Each is planned alone first. Then each in turn is planned again among the plans of the others,
    until none changes: stages of one model should not stall those of the next.

    Args:
        workloads: one per model, in the order of their calls; alike but for costs and run type.
        limits: of all models, or of each.
        effort: see :func:`plan_iteration`; for each model and turn.

    Returns:
        One plan per model. ``iteration_ms`` of each is that of the whole iteration.

    Raises:
        InvalidValueError: see :func:`plan_iteration`; or the workloads differ in machine, mode or
            rules, or there are none.
    """
    if limits is None or isinstance(limits, PlanLimits):
        limits = [limits or PlanLimits()] * len(workloads)
    each = list(limits)
    _check_alike(workloads, each)
    spaces = [PlanSpace(*pair) for pair in zip(workloads, each, strict=True)]
    if len(spaces) == 1:
        return [plan_iteration(workloads[0], each[0], effort=effort)]
    searches = [_search(space, ((), ()), effort) for space in spaces]
    cuts = [_best(space, search) for space, search in zip(spaces, searches, strict=True)]
    for _ in range(_TURNS):
        before = list(cuts)
        for index, space in enumerate(spaces):
            others = _schedules_around(spaces, cuts, index)
            searches[index] = _search(space, others, effort, start=cuts[index])
            cuts[index] = _best(space, searches[index])
        if cuts == before:
            break
    return [
        _planned(space, search, _schedules_around(spaces, cuts, index))
        for index, (space, search) in enumerate(zip(spaces, searches, strict=True))
    ]


def _search(space: PlanSpace, others: Others, effort: int, start: Cut | None = None) -> Search:
    """Look for a plan of one model, given what the others run."""
    bound_ms = _bound_ms(space, others)
    if _are_few(space):
        search = Search(space, _WITHOUT_END, bound_ms, is_thorough=True, others=others)
        search.run(try_every_plan)
        return search
    search = Search(space, effort, bound_ms, others=others)
    starts = [] if start is None else [start]
    if any(spec.upload_bytes_per_ms for spec in space.workload.machine.devices):
        starts += _without_uploads(space, effort // 3)
    search.run(lambda search: _time(search, starts), scan_speeds, scan, improve)
    if search.best is None:
        search.run(lambda search: _time(search, [_leanest(space)]))
    return search


def _without_uploads(space: PlanSpace, effort: int) -> list[Cut]:
    """Plans that are good where uploads take no time: with luck, they hide the uploads, too."""
    machine = space.workload.machine
    fast = tuple(replace(spec, upload_bytes_per_ms=None) for spec in machine.devices)
    workload = replace(space.workload, machine=replace(machine, devices=fast))
    search = Search(PlanSpace(workload, space.limits), effort, 0.0)
    search.run(scan_speeds, scan)
    return [cut for _, cut in search.fastest(_STARTS)]


def _are_few(space: PlanSpace) -> bool:
    """Whether there are so few plans that all can be tried, at about the usual effort."""
    workload = space.workload
    if not workload.machine.is_uniform:
        iterations = 2 * len(workload.machine)
    else:
        iterations = 1 if workload.mode == "sync" else 4
    return count_plans(space) * space.layers * iterations <= _FEW


def _time(search: Search, cuts: Sequence[Cut]) -> None:
    for cut in cuts:
        search.time(cut)


def _leanest(space: PlanSpace) -> Cut:
    """One layer in every stage."""
    per_round = space.limits.rounds_of(space.workload.microbatches)[0]
    return SeedMaker(space).cut(space.layers, space.layers, 1, per_round)


def _bound_ms(space: PlanSpace, others: Others) -> float:
    """A time that no plan can beat; with other models, from their work alone."""
    workload = space.workload
    if others == ((), ()):
        return least_iteration_ms(workload, space.limits)
    if not workload.machine.is_uniform:
        return 0.0
    given, _ = device_loads(len(workload.machine), [*others[0], *others[1]])
    work = sum(given) + least_work_ms(workload, space.limits) / workload.machine.devices[0].speed
    return work / len(workload.machine)


def _best(space: PlanSpace, search: Search) -> Cut:
    """The plan that was found.

    Raises:
        InvalidValueError: none was; saying what stands in the way.
    """
    if search.best is not None:
        return search.best
    leanest = _leanest(space)
    full = [need for need in space.memory(space.steps(leanest)) if need.excess_bytes > 0]
    if full:
        raise InvalidValueError(_does_not_fit(space, max(full, key=lambda need: need.excess_bytes)))
    raise InvalidValueError(
        f"no plan of {space.workload.costs.name} keeps to {space.limits}; one layer in every stage "
        "does not either. Raise the limits on layers, or lower min_stages"
    )


def _does_not_fit(space: PlanSpace, need: MemoryNeed) -> str:
    step = need.step
    layers = (
        f"layer {step.start}"
        if step.stop - step.start == 1
        else (f"layers {step.start}..{step.stop - 1}")
    )
    device = space.workload.machine.devices[need.device].name
    return (
        f"no plan of {space.workload.costs.name} fits: the {PHASES[step.phase]} stage of {layers} "
        f"needs {need.need_bytes} bytes on {device} (weights of it and of the next stage, "
        f"gradients, activations of one microbatch); expected at most {need.limit_bytes}. Use more "
        "microbatches, cut the layer in two, or raise the limit"
    )


def _schedules_around(spaces: Sequence[PlanSpace], cuts: Sequence[Cut], index: int) -> Others:
    schedules = [space.schedule(cut) for space, cut in zip(spaces, cuts, strict=True)]
    return tuple(schedules[:index]), tuple(schedules[index + 1 :])


def _planned(space: PlanSpace, search: Search, others: Others) -> Planned:
    cut = _best(space, search)
    before, after = others
    schedules = (*before, space.schedule(cut), *after)
    devices = len(space.workload.machine)
    pace = pace_of(space.workload, schedules, patience=_LONG)
    loads, _ = device_loads(devices, schedules, devices)
    return Planned(
        space.workload,
        space.limits,
        space.plan(cut),
        cut.per_round,
        pace.iteration_ms,
        _bound_ms(space, others),
        sum(loads) / devices,
        search.tried,
        _are_few(space),
    )


def _check_alike(workloads: Sequence[Workload], limits: Sequence[PlanLimits]) -> None:
    if not workloads:
        raise InvalidValueError("got no workloads; expected one per model")
    if len(limits) != len(workloads):
        raise InvalidValueError(
            f"got {len(limits)} limits for {len(workloads)} models; expected one per model, or one"
        )
    first = workloads[0]
    for index, workload in enumerate(workloads):
        for name in ("machine", "mode", "rules", "run_type"):
            if getattr(workload, name) != getattr(first, name):
                raise InvalidValueError(
                    f"model {index} has another {name} than model 0; models that are planned "
                    "together share it"
                )
