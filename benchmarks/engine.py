"""Tokens per second of roundpipe against two ways to train the same model on the same host.

    python benchmarks/engine.py [--rounds 5] [--iterations 3] ...

One run, alternating, same model, microbatches and optimizer (fused AdamW), each on the same cores:

- roundpipe: `forward_backward` and asynchronous step on 2 CPU devices;
- (a) a plain gradient-accumulation loop, every layer checkpointed, intra-op threads on all cores;
- (b) `torch.distributed.pipelining`, schedule 1F1B, 2 gloo processes of one thread each, every
  layer checkpointed.

Prints the median over rounds and the ratios, and what one empty (stage, microbatch) costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    microbatches: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_in, self.norm_mid = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm_in(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_mid(x))))
        return added


class Checkpointed(nn.Module):
    """A layer that recomputes its activations in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def build(shape: Shape) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(shape) for _ in range(shape.layers)]
    return nn.Sequential(
        nn.Embedding(shape.vocabulary, shape.hidden),
        *blocks,
        nn.Linear(shape.hidden, shape.vocabulary),
    )


def batch_of(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.sequence)
    tokens = torch.randint(0, shape.vocabulary, size, generator=generator)
    return tokens, tokens.roll(-1, 1)


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), label.flatten(), reduction="sum") / label.numel()


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=True)


Iterate = Callable[[], float]


def roundpipe_iteration(shape: Shape, devices: int) -> tuple[Iterate, RoundPipe]:
    config = RoundPipeRunConfig(num_microbatch=shape.microbatches)
    pipe = RoundPipe(build(shape), model_run_config=config, devices=f"cpu:{devices}", name="bench")
    tokens, labels = batch_of(shape)
    with OptimizerCtx():
        optimizer = optimizer_for(pipe.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def iterate() -> float:
        loss = pipe.forward_backward((tokens,), label=labels, loss_fn=loss_of)
        pipe.step(step)
        return float(loss)

    return iterate, pipe


def plain_iteration(shape: Shape) -> Iterate:
    first, *rest = build(shape)
    model = nn.Sequential(first, *(Checkpointed(layer) for layer in rest))
    tokens, labels = batch_of(shape)
    optimizer = optimizer_for(model.parameters())

    def iterate() -> float:
        total = 0.0
        pieces = zip(
            tokens.chunk(shape.microbatches), labels.chunk(shape.microbatches), strict=True
        )
        for piece, label in pieces:
            loss = loss_of(model(piece), label)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return iterate


def _one_f_one_b(rank: int, shape: Shape, store: str, commands: Connection) -> None:
    """A rank of the 1F1B pipeline: runs an iteration for every number it is sent."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layers = list(build(shape))
    half = len(layers) // 2
    mine = layers[:half] if rank == 0 else layers[half:]
    module = nn.Sequential(*(x if isinstance(x, nn.Embedding) else Checkpointed(x) for x in mine))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, shape.microbatches, loss_fn=loss_of, scale_grads=False)
    optimizer = optimizer_for(module.parameters())
    tokens, labels = batch_of(shape)
    while True:
        count = commands.recv()
        if count == 0:
            break
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=labels, losses=[])
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        commands.send(time.perf_counter() - begin)
    dist.destroy_process_group()


class OneFOneB:
    """The two processes of the 1F1B pipeline."""

    def __init__(self, shape: Shape) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_one_f_one_b, args=(rank, shape, store, theirs))
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, count: int) -> float:
        """Seconds of ``count`` iterations."""
        for pipe in self._pipes:
            pipe.send(count)
        seconds: list[float] = [pipe.recv() for pipe in self._pipes]
        return max(seconds)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def timed(iterate: Iterate, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        iterate()
    return time.perf_counter() - begin


def compare(shape: Shape, rounds: int, iterations: int) -> None:
    cores = len(os.sched_getaffinity(0))
    pipelined, pipe = roundpipe_iteration(shape, 2)
    plain = plain_iteration(shape)
    other = OneFOneB(shape)
    losses = [pipelined() for _ in range(2)], [plain() for _ in range(2)]
    other.run(2)
    print(f"cores {cores}; {shape}")
    print(f"first losses: roundpipe {losses[0][0]:.6f}, plain {losses[1][0]:.6f}")
    seconds: dict[str, list[float]] = {"roundpipe": [], "plain": [], "1F1B": []}
    for _ in range(rounds):
        seconds["roundpipe"].append(timed(pipelined, iterations))
        pipe.synchronize()  # no step of this one runs into the next one's time
        seconds["plain"].append(timed(plain, iterations))
        seconds["1F1B"].append(other.run(iterations))
    other.close()
    report(seconds, shape.tokens * iterations)
    where_time_goes(pipe)
    pipe.close()


def report(seconds: dict[str, list[float]], tokens: int) -> None:
    for name, values in seconds.items():
        rate = tokens / statistics.median(values)
        print(f"{name:10} {rate:9.0f} tokens/s   rounds (s): {[round(v, 3) for v in values]}")
    for letter, name in (("a", "plain"), ("b", "1F1B")):
        pairs = zip(seconds[name], seconds["roundpipe"], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        print(f"ratio to ({letter}) {name}: {ratio:.3f}")


def where_time_goes(pipe: RoundPipe) -> None:
    """Busy share of each device in the latest calls, from the event log."""
    spans = [span for span in pipe.event_log if span.microbatch >= 0]
    calls = sorted({span.call for span in spans})[-2:]  # of one round, with nothing in between
    spans = [span for span in spans if span.call in calls]
    length = max(s.end_ns for s in spans) - min(s.begin_ns for s in spans)
    for device in sorted({span.device for span in spans}):
        mine = [span for span in spans if span.device == device]
        by_phase = {
            phase: sum(s.end_ns - s.begin_ns for s in mine if s.phase == phase) / length
            for phase in sorted({s.phase for s in mine})
        }
        shares = ", ".join(f"{phase} {share:.1%}" for phase, share in by_phase.items())
        print(f"{device}: {shares}, other {1 - sum(by_phase.values()):.1%}")


class Scale(nn.Module):
    """A layer that does next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def dispatch_cost(layers: int = 32, microbatches: int = 8, repeats: int = 30) -> None:
    """Time of one (stage, microbatch) whose layer does next to nothing."""
    model = nn.Sequential(*(Scale() for _ in range(layers)))
    plan = ModelExecutePlan([range(i, i + 1) for i in range(layers)], [])
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
    x = torch.ones(microbatches, 4)
    for devices in (1, 2):
        with RoundPipe(model, model_run_config=config, devices=f"cpu:{devices}") as pipe:
            with torch.no_grad():
                pipe(x)
                seconds = [timed(lambda: float(pipe(x).sum()), 1) for _ in range(repeats)]
        cost_us = statistics.median(seconds) / (layers * microbatches) * 1e6
        best_us = min(seconds) / (layers * microbatches) * 1e6
        print(f"empty (stage, microbatch), {devices} CPU device(s): median {cost_us:.0f} us, "
              f"best {best_us:.0f} us")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3)
    for name, default in (("layers", 12), ("hidden", 256), ("heads", 4), ("vocabulary", 2048),
                          ("sequence", 128), ("batch", 16), ("microbatches", 4)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    rounds, iterations = options.pop("rounds"), options.pop("iterations")
    dispatch_cost()
    compare(Shape(**options), rounds, iterations)


if __name__ == "__main__":
    main()
