"""Predicted against real: ``python benchmarks/plan_real.py [--picture FILE]``.

The layers of a model are busy for a known time: they sleep, so that more devices than cores can be
busy at once. The simulator predicts an iteration from these times alone, the engine runs it on CPU
devices, and both are printed. ``--picture`` draws one case, predicted over measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.costs import ModelCosts
from roundpipe.plan import (
    LayerCost,
    LayerCosts,
    PlanLimits,
    Simulation,
    StagePlan,
    Timeline,
    Workload,
    plan_iteration,
    simulate,
)
from roundpipe.plan.timeline import COMPUTE
from roundpipe.plot import plot_overlay, save_picture
from roundpipe.profile import Profile

ITERATIONS = 4
STEP_MS = 40.0


class Nap(torch.autograd.Function):
    """Identity that is busy for a while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return grads[0], None, None


class Busy(nn.Module):
    """A layer with a weight and a known busy time."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.forward_ms, self.backward_ms = forward_ms, backward_ms
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The weight comes first, so that also the first layer has a backward.
        napped: torch.Tensor = Nap.apply(x * self.weight, self.forward_ms, self.backward_ms)
        return napped


@dataclass(frozen=True)
class Case:
    """What is predicted and run.

    Attributes:
        devices: number of CPU devices.
        microbatches: of an iteration.
        times_ms: forward and backward of each layer.
        is_wide: whether the last layer, a heavy head, may run on several devices at once.
        mode: of the steps; ``none`` for no steps.
        step_ms: for how long a step sleeps, the same for each layer.
    """

    devices: int
    microbatches: int
    times_ms: Sequence[tuple[float, float]]
    is_wide: bool
    mode: str
    step_ms: float = STEP_MS

    @property
    def update_ms(self) -> float:
        """For how long the update of a layer sleeps."""
        return self.step_ms / len(self.times_ms)

    def costs(self) -> LayerCosts:
        step_ms = 0.0 if self.mode == "none" else self.update_ms
        return LayerCosts(tuple(LayerCost(f, b, optimizer_ms=step_ms) for f, b in self.times_ms))


EVEN = ((16.0, 32.0),) * 8
HEAVY = (*((16.0, 32.0),) * 6, (48.0, 96.0))

CASES = (
    Case(2, 4, EVEN, False, "none"),
    Case(3, 6, EVEN, False, "none"),
    Case(4, 8, EVEN, False, "none"),
    Case(2, 4, EVEN, False, "sync"),
    Case(2, 4, EVEN, False, "async"),
    Case(2, 4, HEAVY, True, "none"),
    Case(3, 6, HEAVY, True, "none"),
    Case(4, 8, HEAVY, True, "none"),
    Case(4, 8, HEAVY, False, "none"),
)


@dataclass(frozen=True)
class Outcome:
    """What came out of a case.

    Attributes:
        plan: what was run.
        predicted_ms: time of an iteration, simulated from the known times alone.
        from_costs_ms: the same, simulated from what the engine itself has measured.
        real_ms: time of an iteration; the median.
        same_order: whether every device did the same in the same order as in the simulation.
        predicted: the simulated timeline, from measured costs.
        measured: the real one.
    """

    plan: StagePlan
    predicted_ms: float
    from_costs_ms: float
    real_ms: float
    same_order: bool
    predicted: Timeline
    measured: Timeline


def run(case: Case) -> Outcome:
    model = nn.Sequential(*(Busy(*times) for times in case.times_ms))
    config = RoundPipeRunConfig(num_microbatch=case.microbatches)
    name = f"{case.devices} devices, {case.microbatches} microbatches, steps: {case.mode}"
    with RoundPipe(model, None, name, config, devices=f"cpu:{case.devices}") as pipe:
        machine = replace(pipe.plan_machine(), hop_ms=0.0, stage_ms=0.0)
        known = replace(pipe.costs(), layers=case.costs(), machine=machine)
        plan = planned(case, known)
        profile = train(pipe, plan, case)
        predicted, from_costs = (predict(case, costs, plan) for costs in (known, pipe.costs()))
        return Outcome(
            plan,
            pace_ms(predicted),
            pace_ms(from_costs),
            profile.iteration_ms(),
            order(profile.timeline) == order(predicted.timeline),
            from_costs.timeline,
            profile.timeline,
        )


def planned(case: Case, known: ModelCosts) -> ModelExecutePlan:
    """The planner's plan for the known times."""
    limits = PlanLimits(
        max_replicas=None if case.is_wide else 1,
        min_stages=case.devices,
        microbatches_per_round=(case.microbatches,),
    )
    plan = plan_iteration(workload_of(case, known), limits).plan
    return ModelExecutePlan(plan.fwd_plan, plan.bwd_plan, plan.fwd_replicas, plan.bwd_replicas)


def predict(case: Case, costs: ModelCosts, plan: StagePlan) -> Simulation:
    return simulate(workload_of(case, costs), plan, iterations=ITERATIONS)


def workload_of(case: Case, costs: ModelCosts) -> Workload:
    mode = "sync" if case.mode == "none" else case.mode
    return costs.workload(mode, microbatches=case.microbatches)


def pace_ms(simulation: Simulation) -> float:
    ends = simulation.ends_ms
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def train(pipe: RoundPipe, plan: ModelExecutePlan, case: Case) -> Profile:
    x = torch.ones(case.microbatches, 4)
    config = RoundPipeRunConfig(execute_plan=plan)
    optimizer = napping_optimizer(pipe, case.update_ms)

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def iterate() -> None:
        pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=config)
        if case.mode == "layerwise":
            pipe.step(optimizer)
        elif case.mode != "none":
            pipe.step(step_fn, is_async=case.mode == "async")

    for _ in range(2):  # layers are watched for random numbers when they first run
        iterate()
    pipe.synchronize()
    with pipe.profile() as profile:
        for _ in range(ITERATIONS):
            iterate()
    return profile


def napping_optimizer(pipe: RoundPipe, nap_ms: float) -> torch.optim.Optimizer:
    """An optimizer that also sleeps for each parameter that it updates.

    Its type is torch's: of those it is known that they treat each parameter by itself.
    """
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.0)
    update = optimizer.step

    def step() -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        time.sleep(nap_ms / 1e3 * sum(param.grad is not None for param in params))
        update()

    setattr(optimizer, "step", step)  # noqa: B010 - what torch's schedulers do to it, too
    return optimizer


def order(timeline: Timeline) -> list[list[tuple[int, int, int]]]:
    """For each device, the (call, stage, microbatch) that it computed, in order.

    Which device begins depends on the calls before; so devices are sorted by what they did first.
    """
    calls = sorted({(span.iteration, span.call) for span in timeline.spans if span.kind in COMPUTE})
    number = {call: position for position, call in enumerate(calls)}
    return sorted(
        [
            (number[span.iteration, span.call], span.stage, span.microbatch)
            for span in timeline.of(device, *COMPUTE)
        ]
        for device in range(len(timeline.devices))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", help="draw the case of 3 devices with a wide stage")
    arguments = parser.parse_args()
    print(
        "| devices | microbatches | layers | steps | stages | wide | predicted ms | real ms | off "
        "| from measured costs ms | off |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        outcome = run(case)
        print(row(case, outcome))
        if not outcome.same_order:
            print(f"the order of events differs: {case}")
        if arguments.picture and case.is_wide and case.devices == 3:
            picture = plot_overlay(outcome.predicted, outcome.measured)
            save_picture(picture, arguments.picture)


def row(case: Case, outcome: Outcome) -> str:
    plan, real_ms = outcome.plan, outcome.real_ms
    wide = max((*plan.fwd_replicas, *plan.bwd_replicas))
    layers = f"{len(case.times_ms)}{'' if case.times_ms is EVEN else ', heavy head'}"
    return (
        f"| {case.devices} | {case.microbatches} | {layers} | {case.mode} "
        f"| {len(plan.fwd_plan)} + {len(plan.bwd_plan)} | {wide if wide > 1 else 'no'} "
        f"| {outcome.predicted_ms:.1f} | {real_ms:.1f} "
        f"| {100 * (real_ms / outcome.predicted_ms - 1):+.1f}% | {outcome.from_costs_ms:.1f} "
        f"| {100 * (real_ms / outcome.from_costs_ms - 1):+.1f}% |"
    )


if __name__ == "__main__":
    main()
