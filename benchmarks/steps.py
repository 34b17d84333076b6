"""Time of a whole training iteration with synchronous, layer-wise and asynchronous steps.

Run ``python benchmarks/steps.py``. A stack of square linear layers on CPU devices, whose update is
a good part of the iteration. The ways take turns; printed is the median and the best of the rounds.
CPU devices and the optimizer share the cores: what overlaps here fills gaps that devices leave.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, optim


def total(output: Tensor, _label: object) -> Tensor:
    return output.square().mean()


def ways(pipe: RoundPipe, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], None]]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {
        "synchronous": lambda: pipe.step(step, is_async=False),
        "layer by layer": lambda: pipe.step(optimizer),
        "asynchronous": lambda: pipe.step(step),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=3, help="in each round")
    arguments = parser.parse_args()
    width = arguments.width
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(arguments.layers)))
    x = torch.randn(arguments.rows, width)
    times_ms: dict[str, list[float]] = {}
    config = RoundPipeRunConfig(num_microbatch=3)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        optimizer = optim.AdamW(pipe.optim_parameters())
        for turn in range(arguments.rounds + 1):
            for name, step in ways(pipe, optimizer).items():
                pipe.synchronize()
                begin_s = time.perf_counter()
                for _ in range(arguments.iterations):
                    pipe.forward_backward((x,), loss_fn=total)
                    step()
                pipe.synchronize()
                if turn > 0:
                    spent_ms = (time.perf_counter() - begin_s) * 1e3 / arguments.iterations
                    times_ms.setdefault(name, []).append(spent_ms)
    for name, spent in times_ms.items():
        print(f"{name:16} median {statistics.median(spent):7.1f} ms, best {min(spent):7.1f} ms")


if __name__ == "__main__":
    main()
