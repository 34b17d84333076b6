"""What no plan can beat."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from roundpipe.plan.iterations import Schedule
from roundpipe.plan.workload import PlanLimits, Workload


def least_work_ms(workload: Workload, limits: PlanLimits) -> float:
    """The least device time that an iteration takes, summed over devices of speed 1.

    Every layer runs forward and backward once for each microbatch. All layers but those of the
    fused stage also run forward once more, and the fused stage can only have so many layers.
    """
    layers = workload.costs.layers
    forward = sum(layer.forward_ms for layer in layers)
    if workload.run_type == "infer":
        return workload.microbatches * forward
    again = [layer.again_ms for layer in layers]
    if workload.run_type == "fused":
        most = len(layers) if limits.fused_layers is None else limits.fused_layers
        again = again[: max(len(layers) - most, 0)]
    backward = sum(layer.backward_ms for layer in layers)
    return workload.microbatches * (forward + backward + sum(again))


def least_iteration_ms(workload: Workload, limits: PlanLimits) -> float:
    """A time that no plan can beat, from the work that there is and from the longest chain.

    The devices together do the work at the sum of their speeds. Where iterations do not overlap,
    moreover, one microbatch passes through all layers, forward and backward, one after another. In
    ``sync`` mode the step follows; with steps that overlap, steps follow one another.
    """
    if workload.costs_by_kind:
        return 0.0
    speeds = [device.speed for device in workload.machine.devices]
    work = least_work_ms(workload, limits) / sum(speeds)
    chain = sum(_chain_ms(workload)) / max(speeds)
    step = 0.0 if workload.run_type == "infer" else workload.optimizer_ms
    if workload.mode == "sync":
        return max(work, chain) + step
    if workload.rules.overlap_calls:
        return max(work, step)
    if workload.mode == "layerwise" and workload.run_type != "infer":
        return _least_layerwise_ms(workload, limits, speeds)
    return max(work, chain, step)


def _chain_ms(workload: Workload) -> tuple[float, float]:
    """A microbatch's way through all layers: forward, as far as it is in turn, and backward."""
    layers = workload.costs.layers
    forward = sum(layer.forward_ms for layer in layers)
    if workload.run_type == "infer":
        return forward, 0.0
    if workload.run_type == "fused" and workload.rules.early_fused_forward:
        forward = 0.0  # the fused stage, whose layers are not known, does not wait for its turn
    return forward, sum(layer.backward_ms for layer in layers)


def _least_layerwise_ms(workload: Workload, limits: PlanLimits, speeds: Sequence[float]) -> float:
    """Where layers are updated upwards between calls: no layer runs before its own update.

    Behind the update of a layer lie its own forward, that of those above it, and all backward.
    """
    layers, count = workload.costs.layers, workload.microbatches
    work = least_work_ms(workload, limits)
    forward, backward = _chain_ms(workload)
    again = work - count * (sum(layer.forward_ms for layer in layers) + backward)
    if workload.rules.early_recompute:
        again = 0.0  # some may be in front of the update of the last layer
    best = updated = 0.0
    for layer in layers:
        updated += layer.optimizer_ms
        chain = forward + backward
        best = max(best, updated + max(work / sum(speeds), chain / max(speeds)))
        forward = max(forward - layer.forward_ms, 0.0)
        work = count * (forward + backward) + again
    return best


def device_loads(
    devices: int, schedules: Sequence[Schedule], iterations: int = 1
) -> tuple[list[float], int]:
    """How long each device computes, and whose turn it is afterwards.

    Args:
        devices: how many there are.
        schedules: what an iteration runs, from device 0 on.
        iterations: how many.
    """
    loads = [0.0] * devices
    cursor = 0
    for schedule in [*schedules] * iterations:
        early, main, count = schedule.tables.early, schedule.tables.main, schedule.microbatches
        stage_ms = schedule.tables.stage_ms
        for steps in schedule.calls * schedule.rounds:
            for phase, start, stop, replicas in steps:
                width = 1 if replicas == 1 else min(replicas, devices, count)
                for replica in range(width):
                    sums, more = early[phase][cursor], main[phase][cursor]
                    time = sums[stop] - sums[start] + more[stop] - more[start] + stage_ms
                    share = count if width == 1 else len(range(replica, count, width))
                    loads[cursor] += time * share
                    cursor = cursor + 1 if cursor + 1 < devices else 0
    return loads, cursor


def least_load_ms(workload: Workload, schedules: Sequence[Schedule]) -> float:
    """A time that this plan cannot beat on a uniform machine: the work of its busiest devices.

    Where iterations overlap, an iteration begins where the last one ended, so that devices take
    turns in a stage. Over many iterations a device shares all stages that any device of its class
    has, where a class is what the greatest common divisor of devices and stages lets mix.
    """
    if not workload.machine.is_uniform:
        return 0.0
    devices = len(workload.machine)
    loads, cursor = device_loads(devices, schedules)
    if workload.mode == "sync" or not workload.rules.overlap_calls:
        return max(loads)
    mixed = gcd(cursor, devices)
    return max(sum(loads[turn::mixed]) for turn in range(mixed)) * mixed / devices
