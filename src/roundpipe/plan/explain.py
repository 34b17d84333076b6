"""Why this plan, what limits it, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roundpipe.plan.bubbles import CAUSES, BubbleAccount, account_of
from roundpipe.plan.costs import LayerCosts
from roundpipe.plan.iterations import pace_of
from roundpipe.plan.memory import MemoryNeed
from roundpipe.plan.planner import Planned, memory_of
from roundpipe.plan.simulate import schedule_of, simulate
from roundpipe.plan.timeline import Timeline
from roundpipe.plan.workload import HEAVY_FACTOR, MODES, Workload

_MANY = 6
_WORTH_SAYING_PERCENT = 0.3
_NEARLY_FULL = 0.9

_CAUSE_TEXTS = {
    "fill": "waiting for the first microbatch at the start of an iteration",
    "switch": "waiting between two stages for the input of the second",
    "steady": "waiting within a stage for its next microbatch",
    "drain": "waiting at the end of an iteration for the last stages",
    "upload": "waiting for weights",
    "step": "waiting for the optimizer step",
}

_MODE_TEXTS = {
    "layerwise": (
        "layers were updated one by one beside the next iteration",
        "model.step(optimizer); the numbers are those of synchronous steps",
    ),
    "async": (
        "steps were asynchronous",
        "model.step(step_fn); calls compute with parameters that are one step older",
    ),
}


@dataclass(frozen=True)
class WhatIf:
    """What the same plan would take if something were otherwise.

    Attributes:
        change: what would be otherwise.
        advice: how to get there.
        iteration_ms: the time then, for as many microbatches as now.
        gain_percent: how much shorter that is.
    """

    change: str
    advice: str
    iteration_ms: float
    gain_percent: float


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as fast as it is.

    Attributes:
        planned: the plan.
        account: where the devices' time goes.
        what_ifs: what would help, most first; only what would help noticeably.
        memory: the fullest moment of each device with a limit.
    """

    planned: Planned
    account: BubbleAccount
    what_ifs: tuple[WhatIf, ...]
    memory: tuple[MemoryNeed, ...]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(planned: Planned) -> Explanation:
    """Say why a plan is as fast as it is, and what would make it faster."""
    what_ifs = sorted(_what_ifs(planned), key=lambda item: -item.gain_percent)
    return Explanation(
        planned,
        account_of_plan(planned)[0],
        tuple(item for item in what_ifs if item.gain_percent >= _WORTH_SAYING_PERCENT),
        tuple(memory_of(planned)),
    )


def account_of_plan(planned: Planned) -> tuple[BubbleAccount, Timeline]:
    """The bubble account of a plan, and the timeline that shows it.

    On a uniform machine in ``sync`` mode that is one iteration. Otherwise it is some time in the
    midst of many iterations; the timeline shows two of them.
    """
    workload = planned.workload
    devices = len(workload.machine)
    repeats = workload.mode == "sync" and workload.machine.is_uniform
    simulation = simulate(
        workload,
        planned.plan,
        microbatches_per_round=planned.microbatches_per_round,
        iterations=1 if repeats else _MANY * devices,
        title=workload.costs.name,
    )
    timeline, ends = simulation.timeline, simulation.ends_ms
    if repeats:
        return account_of(timeline, 0.0, ends[-1]), timeline
    middle = (_MANY // 2) * devices
    account = account_of(timeline, ends[middle - 1], ends[middle + devices - 1])
    return account, timeline.between(ends[middle - 1], ends[middle + 1])


def _what_ifs(planned: Planned) -> Iterator[WhatIf]:
    """The same plan under other numbers."""
    workload = planned.workload
    machine, costs = workload.machine, workload.costs
    now_ms = _time(planned, workload)

    def what_if(change: str, advice: str, other: Workload, share: float = 1.0) -> WhatIf:
        then_ms = _time(planned, other, share) * share
        return WhatIf(change, advice, then_ms, 100 * (1 - then_ms / now_ms) if now_ms else 0.0)

    if machine.hop_ms > 0:
        yield what_if(
            "hops between devices took no time",
            "smaller activations (a 16-bit dtype), faster links, or fewer and longer stages",
            replace(workload, machine=replace(machine, hop_ms=0.0)),
        )
    if machine.stage_ms > 0:
        yield what_if(
            "stages took no time besides their layers'",
            "larger microbatches, or fewer and longer stages",
            replace(workload, machine=replace(machine, stage_ms=0.0)),
        )
    if any(device.upload_bytes_per_ms for device in machine.devices):
        fast = tuple(replace(device, upload_bytes_per_ms=None) for device in machine.devices)
        yield what_if(
            "uploads took no time",
            "page-locked memory, devices that share no link, more microbatches per call, or "
            "narrower stages",
            replace(workload, machine=replace(machine, devices=fast)),
        )
    if workload.optimizer_ms > 0 and workload.run_type != "infer":
        free = tuple(replace(layer, optimizer_ms=0.0) for layer in costs.layers)
        yield what_if(
            "the optimizer step took no time",
            "an optimizer of roundpipe.optim, or more CPU cores",
            replace(workload, costs=replace(costs, layers=free)),
        )
    if workload.run_type != "infer":
        for mode in MODES[MODES.index(workload.mode) + 1 :]:
            yield what_if(*_MODE_TEXTS[mode], replace(workload, mode=mode))
    heaviest, factor = _heaviest(costs)
    if factor > 1:
        yield what_if(
            f"layer {heaviest} took half its time (it takes {factor:.1f} times the median)",
            f"cut layer {heaviest} into smaller layers, make it cheaper, or allow it more replicas",
            replace(workload, costs=_with_half(costs, heaviest), costs_by_kind={}),
        )
    if workload.mode == "sync" or not workload.rules.overlap_calls:
        yield what_if(
            "an iteration had twice as many microbatches",
            "a larger batch, or smaller microbatches",
            replace(workload, microbatches=2 * workload.microbatches),
            share=0.5,
        )


def _time(planned: Planned, workload: Workload, share: float = 1.0) -> float:
    """Time of an iteration under the plan; rounds grow with the microbatches."""
    per_round = round(planned.microbatches_per_round / share)
    return pace_of(workload, [schedule_of(workload, planned.plan, per_round)]).iteration_ms


def _heaviest(costs: LayerCosts) -> tuple[int, float]:
    """The layer that takes longest, and how many times the median that is."""
    times = [layer.again_ms + layer.backward_ms for layer in costs.layers]
    layer = max(range(len(times)), key=times.__getitem__)
    middle = sorted(times)[len(times) // 2]
    return layer, times[layer] / middle if middle else 1.0


def _with_half(costs: LayerCosts, index: int) -> LayerCosts:
    layer = costs.layers[index]
    half = replace(
        layer,
        forward_ms=layer.forward_ms / 2,
        backward_ms=layer.backward_ms / 2,
        recompute_ms=layer.again_ms / 2,
    )
    return replace(costs, layers=(*costs.layers[:index], half, *costs.layers[index + 1 :]))


def _nothing_to_widen(planned: Planned) -> bool:
    """Whether stages could be wide, and none was because no layer is heavy."""
    limits, costs = planned.limits, planned.workload.costs
    may_be_wide = len(planned.workload.machine) > 1 and limits.max_replicas != 1
    by_itself = limits.heavy_layers is None and len(costs) > 1
    return may_be_wide and by_itself and not limits.heavy(costs)


# --- text ------------------------------------------------------------------------------------


def _lines(explanation: Explanation) -> Iterator[str]:
    planned, account = explanation.planned, explanation.account
    workload, plan = planned.workload, planned.plan
    yield (
        f"{workload.costs.name}: {len(workload.costs)} layers, {len(workload.machine)} devices, "
        f"{workload.microbatches} microbatches, {workload.mode}"
    )
    yield (
        f"one iteration takes {planned.iteration_ms:.3f} ms, bubble {planned.bubble_percent:.2f}%; "
        f"no plan can take less than {planned.bound_ms:.3f} ms"
    )
    yield "why this plan: " + (
        f"the fastest of all {planned.tried} that there are"
        if planned.is_best
        else f"the fastest of {planned.tried} that were simulated"
    )
    yield (
        f"stages: {len(plan.fwd_plan)} forward, {len(plan.bwd_plan)} backward; "
        f"{planned.microbatches_per_round} microbatches in a call"
    )
    for stage, replicas in zip(
        (*plan.fwd_plan, *plan.bwd_plan), (*plan.fwd_replicas, *plan.bwd_replicas), strict=True
    ):
        if replicas > 1:
            yield f"  layers {stage.start}..{stage.stop - 1} run on {replicas} devices at once"
    if _nothing_to_widen(planned):
        yield (
            "  wide stages were not tried: no layer takes more than "
            f"{HEAVY_FACTOR:g} times the median"
        )
    yield "where the devices' time goes:"
    yield f"  {100 - account.bubble_percent:6.2f}%  computing"
    for cause in CAUSES:
        if account.percent(cause) >= 0.005:
            yield f"  {account.percent(cause):6.2f}%  {cause}: {_CAUSE_TEXTS[cause]}"
    for need in explanation.memory:
        if need.need_bytes >= _NEARLY_FULL * need.limit_bytes:
            yield (
                f"memory limits it: {workload.machine.devices[need.device].name} needs "
                f"{need.need_bytes / 2**30:.2f} of {need.limit_bytes / 2**30:.2f} GiB for layers "
                f"{need.step.start}..{need.step.stop - 1} and what comes next"
            )
            break
    if not explanation.what_ifs:
        yield "nothing that is in your hands would make this plan noticeably faster"
    for item in explanation.what_ifs:
        yield f"if {item.change}: {item.iteration_ms:.3f} ms, {item.gain_percent:.1f}% less"
        yield f"  to get there: {item.advice}"
