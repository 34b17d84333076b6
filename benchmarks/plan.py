"""The table of plans in docs/benchmarks.md: ``python benchmarks/plan.py``.

For each published model: the published makespan beside the simulated one, and the bubbles of the
published partition and of the planner's plan, in both modes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from roundpipe.plan import DeviceSpec, LayerCosts, Machine, Workload, plan_iteration, simulate
from roundpipe.plan.bounds import device_loads
from roundpipe.plan.iterations import pace_of
from roundpipe.plan.published import PublishedModel, published_model, published_names
from roundpipe.plan.simulate import schedule_of

REPEATS = 5


def main() -> None:
    print("| model | published ms | early head ms | waiting head ms |")
    print("| --- | --- | --- | --- |")
    for name in published_names():
        model = published_model(name)
        early, waiting = (makespan(model, is_early) for is_early in (True, False))
        print(f"| {name} | {model.makespan_ms:.3f} | {early:.3f} | {waiting:.3f} |")
    for mode in ("sync", "async"):
        print(f"\n| model, {mode} | published % | its plan here % | planner % | ms | CPU ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name in published_names():
            print(row(published_model(name), mode))
    print(f"\nsimulator, 96 layers: {simulator_ms():.1f} ms CPU")
    for mode in ("sync", "async"):
        print(f"planner, 96 layers, {mode}: {planner_ms(mode):.0f} ms CPU")


def makespan(model: PublishedModel, is_early: bool) -> float:
    workload = model.workload(early_fused_forward=is_early)
    rounds = model.microbatches_per_round
    return simulate(workload, model.plan, microbatches_per_round=rounds).makespan_ms


def row(model: PublishedModel, mode: str) -> str:
    workload = model.workload(mode)
    schedule = schedule_of(workload, model.plan, model.microbatches_per_round)
    busy = sum(device_loads(model.devices, [schedule])[0])
    theirs = 100 * (1 - busy / model.devices / pace_of(workload, [schedule]).iteration_ms)
    begin = time.thread_time()
    planned = plan_iteration(workload, model.limits)
    spent_ms = 1000 * (time.thread_time() - begin)
    bubble = max(planned.bubble_percent, 0.0)
    return (
        f"| {model.name} | {model.published_bubble_percent(mode):.2f} | {theirs:.2f} "
        f"| {bubble:.2f} | {planned.iteration_ms:.1f} | {spent_ms:.0f} |"
    )


def large(mode: str) -> Workload:
    machine = Machine.uniform(8, 1.0, like=DeviceSpec())
    return Workload(LayerCosts.uniform(96, 10.0, 20.0), machine, 16, mode=mode)


def simulator_ms() -> float:
    workload = large("sync")
    plan = plan_iteration(workload).plan
    return min(timed_ms(lambda: simulate(workload, plan)) for _ in range(REPEATS))


def planner_ms(mode: str) -> float:
    return min(timed_ms(lambda: plan_iteration(large(mode))) for _ in range(REPEATS))


def timed_ms(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return 1000 * (time.thread_time() - begin)


if __name__ == "__main__":
    main()
