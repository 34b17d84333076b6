"""The worked example of docs/plans.md: ``python benchmarks/bottleneck.py [--wide] [--folder DIR]``.

A model whose last layer takes three times as long as the others trains on three CPU devices. The
layers sleep for as long as they would compute, so that three devices fit on any machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from plan_real import Busy
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.plan import simulate
from roundpipe.plan.report import account_text

BLOCK_MS, HEAD_MS, BLOCKS = 16.0, 48.0, 6
MICROBATCHES = 6
ITERATIONS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="plan again, from what was measured")
    parser.add_argument("--folder", type=Path, help="where costs, trace and picture go")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times")
    arguments = parser.parse_args()

    times_ms = [arguments.scale * time_ms for time_ms in (*[BLOCK_MS] * BLOCKS, HEAD_MS)]
    layers = [Busy(time_ms, 2 * time_ms) for time_ms in times_ms]
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with RoundPipe(
        nn.Sequential(*layers), name="model", devices="cpu:3", model_run_config=config
    ) as model:
        x = torch.ones(MICROBATCHES, 4)
        plan = None

        def iterate() -> None:
            run_config = RoundPipeRunConfig(execute_plan=plan)
            model.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=run_config)

        for _ in range(5):  # measures, and plans again after two of them and after four
            iterate()
        if arguments.wide:
            plan = ModelExecutePlan.auto("fused", model, num_microbatch=MICROBATCHES)
            iterate()
        with model.profile() as profile:
            for _ in range(ITERATIONS):
                iterate()

        print(model.costs())
        used = plan or model.current_plan("fused", MICROBATCHES)
        print(f"\nforward stages {used.fwd_plan}, on {used.fwd_replicas} devices")
        print(f"backward stages {used.bwd_plan}, on {used.bwd_replicas} devices")
        print(f"iteration {profile.iteration_ms():.1f} ms; {account_text(profile.account())}")
        if arguments.folder is not None:
            arguments.folder.mkdir(parents=True, exist_ok=True)
            workload = model.costs().workload("sync")
            predicted = simulate(workload, used, iterations=ITERATIONS).timeline
            model.costs().save(arguments.folder / "costs.json")
            profile.save_trace(arguments.folder / "trace.json", predicted)
            profile.save_picture(arguments.folder / "timeline.png", predicted)


if __name__ == "__main__":
    main()
