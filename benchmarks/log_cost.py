"""What measuring costs: ``python benchmarks/log_cost.py``.

Iterations of a model with everything that is always noted (clocks around layers, spans, bytes,
smoothing), against the same with all of it taken out, in alternating rounds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.costs import CostMeter, RunNotes, RunSamples
from roundpipe.devices.base import HostMoment
from roundpipe.trace import EventLog

ROUNDS = 40
LAYERS = 12
MICROBATCHES = 4
WIDTH = 512
ROWS = 512


class NoNotes:
    """Takes notes of nothing."""

    wants_sizes = False
    _moment = HostMoment(0)

    def __init__(self, *_: Any) -> None:
        pass

    def now(self) -> HostMoment:
        return self._moment

    def samples(self, _log: EventLog) -> RunSamples:
        return RunSamples()

    def __getattr__(self, _name: str) -> Any:
        return _nothing


def _nothing(*_: Any) -> None:
    pass


@contextlib.contextmanager
def without_measuring() -> Iterator[None]:
    with (
        mock.patch("roundpipe.dispatch.RunNotes", NoNotes),
        mock.patch.object(EventLog, "add", _nothing),
        mock.patch.object(CostMeter, "add_run", _nothing),
    ):
        yield


def main() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    stages = [range(i, i + 3) for i in range(0, LAYERS, 3)]
    plan = ModelExecutePlan(stages[:-1], stages[::-1])
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    x = torch.randn(ROWS, WIDTH)
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2", model_run_config=config) as pipe:

        def iteration_ms() -> float:
            # Processor time of all threads: on a busy machine the clock on the wall says little.
            begin_s = time.process_time()
            pipe.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
            return 1e3 * (time.process_time() - begin_s)

        for _ in range(4):
            iteration_ms()
        measured, bare = [], []
        for _ in range(ROUNDS):
            measured.append(iteration_ms())
            with without_measuring():
                bare.append(iteration_ms())
        spans = len([span for span in pipe.event_log if span.call == ROUNDS])
    # The fastest of many: other work on the machine only ever adds.
    fastest_ms, bare_ms = min(measured), min(bare)
    print("| processor ms an iteration, fastest | measured | nothing measured | |")
    print("| --- | --- | --- | --- |")
    print(
        f"| {LAYERS} layers, {MICROBATCHES} microbatches | {fastest_ms:.1f} | {bare_ms:.1f} "
        f"| {100 * (fastest_ms / bare_ms - 1):+.2f}% |"
    )
    alone_us = noting_us()
    print(
        f"\n{spans} spans and {LAYERS * MICROBATCHES * 3} times of layers an iteration; on their "
        f"own they take {alone_us:.0f} us, {alone_us / 10 / bare_ms:.2f}% of it"
    )


def noting_us() -> float:
    """Notes of an iteration and what becomes of them, without anything that they are about."""
    from roundpipe.devices.cpu import CpuDevice

    meter, log, device = CostMeter(), EventLog(), CpuDevice(0, 1)
    best = float("inf")
    for call in range(20):
        begin_s = time.perf_counter()
        record = meter.open_run(True, 1)
        notes = RunNotes(device, call, 0, False)
        for position in range(7):
            notes.stage("backward" if position > 3 else "forward", position, range(3))
            for microbatch in range(MICROBATCHES):
                notes.begin(microbatch)
                for layer in range(3):
                    notes.ran(layer, notes.now())
                    notes.marked(layer)
                if position > 2:
                    notes.backward()
                    for layer in (2, 1, 0):
                        notes.reached(layer)
                    notes.backward_ended()
                notes.end()
        record.add(notes.samples(log))
        meter.settle()
        best = min(best, 1e6 * (time.perf_counter() - begin_s))
    return best


if __name__ == "__main__":
    main()
