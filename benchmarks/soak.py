"""Many small calls: threads, live tensors and memory must not grow.

    python benchmarks/soak.py [--calls 10000]

Prints a line at each tenth of the way. Exits with 1 if threads or live tensors grew after the first
tenth, or memory after the middle: until then the model's event log, which is bounded, fills.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

GROWTH_MIB = 4.0  # what allocators may keep; one kilobyte a call would pass it


class Sample(NamedTuple):
    """What is alive at one moment."""

    threads: int
    tensors: int
    rss_mib: float


def take_sample() -> Sample:
    gc.collect()
    # By type: some objects of torch warn when they are asked for their class.
    tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    return Sample(threading.active_count(), tensors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def build_calls(pipe: RoundPipe) -> list[Callable[[torch.Tensor], Any]]:
    """Each kind of call that a training script makes."""
    optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-3)
    ranges = [range(2), range(2, 4)]
    split = RoundPipeRunConfig(execute_plan=ModelExecutePlan(ranges, ranges[::-1]))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def fused(x: torch.Tensor) -> None:
        pipe.forward_backward((x,), label=x, loss_fn=lambda out, label: ((out - label) ** 2).sum())
        pipe.step(step)

    def driven(x: torch.Tensor) -> None:
        pipe(x, roundpipe_run_config=split).square().sum().backward()
        pipe.step(step, is_async=False)

    def evaluated(x: torch.Tensor) -> None:
        with torch.no_grad():
            pipe(x, roundpipe_run_config=split)

    return [fused, fused, driven, evaluated]


def main() -> int:
    """Run the calls. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    wanted: int = parser.parse_args().calls
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8))
    samples: list[Sample] = []
    begin_s = time.perf_counter()
    with RoundPipe(model, devices="cpu:2", name="soak") as pipe:
        calls = build_calls(pipe)
        for number in range(1, wanted + 1):
            calls[number % len(calls)](torch.randn(6, 8))
            if number % max(1, wanted // 10) == 0:
                pipe.synchronize()
                pipe.zero_grad()
                samples.append(take_sample())
                now = samples[-1]
                print(
                    f"{number:6d} calls {time.perf_counter() - begin_s:7.1f} s  threads "
                    f"{now.threads}  live tensors {now.tensors}  rss {now.rss_mib:.1f} MiB",
                    flush=True,
                )
    first, middle, last = samples[0], samples[len(samples) // 2 - 1], samples[-1]
    is_steady = (
        last.threads == first.threads
        and last.tensors == first.tensors
        and last.rss_mib - middle.rss_mib < GROWTH_MIB
    )
    print("nothing grew" if is_steady else f"grew: {first} -> {middle} -> {last}")
    return 0 if is_steady else 1


if __name__ == "__main__":
    sys.exit(main())
