"""What the ways to step gain: iterations with synchronous, layer-wise and asynchronous steps.

Run ``python benchmarks/steps.py [PART ...]``; without a part, all of them:

published   simulated: published layer times on 8 devices; steps take some share of the calls' time
scripted    predicted and real: layers and updates sleep for a known time, so that devices and
            optimizer take nothing from each other
computing   real: linear layers on CPU devices, which share the cores with the optimizer; the ways
            take turns, and printed is the median and the best of the rounds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from plan_real import EVEN, Case, run
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.plan import ENGINE_RULES, Workload, plan_iteration
from roundpipe.plan.published import PublishedModel, published_model, published_names

WAYS = {"sync": "synchronous", "layerwise": "layer by layer", "async": "asynchronous"}
STEP_PERCENT = (10, 25)
SCRIPTED = ((2, 2, 160.0), (4, 4, 320.0))


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


# --- simulated -------------------------------------------------------------------------------


def print_published() -> None:
    heads = ("model", "step ms", *(f"{way} ms" for way in WAYS.values()), "hidden layer by layer")
    print_row(*heads)
    print_row(*["---"] * len(heads))
    for name in published_names():
        model = published_model(name)
        calls_ms = planned_ms(model, "async", 0.0)
        for percent in STEP_PERCENT:
            step_ms = calls_ms * percent / 100
            times_ms = [planned_ms(model, way, step_ms) for way in WAYS]
            hidden = 100 * (times_ms[0] - times_ms[1]) / step_ms
            cells = (f"{time_ms:.0f}" for time_ms in (step_ms, *times_ms))
            print_row(name, *cells, f"{hidden:.0f}% of the step")


def planned_ms(model: PublishedModel, mode: str, step_ms: float) -> float:
    """Time of an iteration under the planner's plan, as this package's engine orders work."""
    costs = model.costs
    layers = tuple(replace(layer, optimizer_ms=step_ms / len(costs)) for layer in costs.layers)
    workload = Workload(
        replace(costs, layers=layers),
        model.workload().machine,
        model.microbatches,
        mode=mode,
        rules=replace(ENGINE_RULES, early_recompute=True),  # as on all devices but CPUs
    )
    return plan_iteration(workload, model.limits).iteration_ms


# --- layers and updates that sleep -----------------------------------------------------------


def print_scripted() -> None:
    heads = ("devices", "microbatches", "step ms", "way", "predicted ms", "real ms", "off")
    print_row(*heads, "from measured costs ms", "off")
    print_row(*["---"] * (len(heads) + 2))
    for devices, microbatches, step_ms in SCRIPTED:
        for mode, way in WAYS.items():
            case = Case(devices, microbatches, EVEN, False, mode, step_ms)
            outcome = run(case)
            real_ms, times_ms = outcome.real_ms, (outcome.predicted_ms, outcome.from_costs_ms)
            off, from_costs_off = (f"{100 * (real_ms / ms - 1):+.1f}%" for ms in times_ms)
            predicted, from_costs = (f"{ms:.0f}" for ms in times_ms)
            print_row(devices, microbatches, f"{step_ms:.0f}", way, predicted, f"{real_ms:.0f}",
                      off, from_costs, from_costs_off)  # fmt: skip
            if not outcome.same_order:
                print(f"the order of events differs: {case}")


# --- layers and updates that compute ---------------------------------------------------------


def total(output: Tensor, _label: object) -> Tensor:
    return output.square().mean()


def ways(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], None]]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {
        "sync": lambda: pipe.step(step, is_async=False),
        "layerwise": lambda: pipe.step(optimizer),
        "async": lambda: pipe.step(step),
    }


def print_computing(arguments: argparse.Namespace) -> None:
    width = arguments.width
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(arguments.layers)))
    x = torch.randn(arguments.rows, width)
    times_ms: dict[str, list[float]] = {}
    config = RoundPipeRunConfig(num_microbatch=3)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        optimizer = optim.AdamW(pipe.optim_parameters())
        for turn in range(arguments.rounds + 1):
            for mode, step in ways(pipe, optimizer).items():
                pipe.synchronize()
                begin_s = time.perf_counter()
                for _ in range(arguments.iterations):
                    pipe.forward_backward((x,), loss_fn=total)
                    step()
                pipe.synchronize()
                if turn > 0:
                    spent_ms = (time.perf_counter() - begin_s) * 1e3 / arguments.iterations
                    times_ms.setdefault(mode, []).append(spent_ms)
    for mode, spent in times_ms.items():
        median_ms = statistics.median(spent)
        print(f"{WAYS[mode]:16} median {median_ms:7.1f} ms, best {min(spent):7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("published", "scripted", "computing")
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {', '.join(parts)}")
    computing = parser.add_argument_group("computing")
    computing.add_argument("--width", type=int, default=1536)
    computing.add_argument("--layers", type=int, default=8)
    computing.add_argument("--rows", type=int, default=48)
    computing.add_argument("--rounds", type=int, default=5)
    computing.add_argument("--iterations", type=int, default=2, help="in each round")
    arguments = parser.parse_args()
    chosen = arguments.parts or parts
    if not set(chosen) <= set(parts):
        parser.error(f"parts are {', '.join(chosen)}; expected some of {', '.join(parts)}")
    if "published" in chosen:
        print_published()
    if "scripted" in chosen:
        print_scripted()
    if "computing" in chosen:
        print_computing(arguments)


if __name__ == "__main__":
    main()
