"""CPU optimizer steps: from 16-bit gradients to 16-bit parameters, and every optimizer in float32.

Run ``python benchmarks/optimizer.py``. It needs 5 GB of memory for 1e8 parameters. Contestants take
turns; printed is the best of several rounds, in wall time and in processor time per thread, which a
busy machine disturbs less.

The whole path, on the parameters of a transformer:

* roundpipe: ``AdamW.step_fused``, with float32 and with bfloat16 moments;
* torch: gradients to float32, ``AdamW(fused=True)``, parameters to bfloat16;
* DeepSpeed: the same around its ``DeepSpeedCPUAdam``, where that is installed;
* copying float32 with ``Tensor.copy_``: 8 bytes of traffic per element. The other figures count 28
  bytes per parameter (the gradient read, the new 16-bit parameter written, master and two moments
  read and written), 20 with bfloat16 moments.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roundpipe import optim
from roundpipe.optim.native import load_kernels

HIDDEN = 1024
GIB = 2**30


@dataclass
class Contestant:
    """Something to time.

    Attributes:
        run: one round.
        traffic_bytes: how much memory traffic a round cannot do without.
        wall_s: the rounds' wall times.
        busy_s: the rounds' processor times, over all threads.
    """

    run: Callable[[], object]
    traffic_bytes: int
    wall_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)


def take_turns(contestants: dict[str, Contestant], rounds: int) -> None:
    """Time all contestants, after one round each that does not count."""
    for turn in range(rounds + 1):
        for contestant in contestants.values():
            wall, busy = time.perf_counter(), time.process_time()
            contestant.run()
            if turn > 0:
                contestant.wall_s.append(time.perf_counter() - wall)
                contestant.busy_s.append(time.process_time() - busy)


def transformer_shapes(total: int) -> list[tuple[int, ...]]:
    """Tensors as they occur in a decoder, ``total`` elements or a little less in all."""
    block: list[tuple[int, ...]] = [
        *[(HIDDEN, HIDDEN)] * 4,
        *[(4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)],
        *[(HIDDEN,)] * 6,
    ]
    size = sum(torch.Size(shape).numel() for shape in block)
    blocks = max(total // size - 1, 0)
    rest = total - blocks * size
    return [(rest // HIDDEN, HIDDEN), *block * blocks]


def filled(shapes: list[tuple[int, ...]], dtype: torch.dtype, deviation: float) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype).normal_(0, deviation) for shape in shapes]


def roundpipe_path(
    masters: list[Tensor], grads: list[Tensor], params: list[Tensor], dtype: torch.dtype
) -> Callable[[], object]:
    own = [master.clone().requires_grad_() for master in masters]
    optimizer = optim.AdamW(own, moment_dtype=dtype)
    bindings = dict(zip(own, map(optim.Binding, grads, params), strict=True))
    return lambda: optimizer.step_fused(bindings)


def converting_path(
    make: Callable[[list[Tensor]], Any],
    masters: list[Tensor],
    grads: list[Tensor],
    params: list[Tensor],
) -> Callable[[], object]:
    own = [master.clone().requires_grad_() for master in masters]
    for master in own:
        master.grad = torch.zeros_like(master)
    optimizer = make(own)

    def run() -> None:
        for master, grad in zip(own, grads, strict=True):
            assert master.grad is not None
            master.grad.copy_(grad)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(own, params, strict=True):
                param.copy_(master)

    return run


def deepspeed_adam() -> Callable[[list[Tensor]], Any] | None:
    try:
        adam = importlib.import_module("deepspeed.ops.adam")
    except ImportError:
        print("DeepSpeed is not installed: its CPU Adam is left out")
        return None
    return lambda params: adam.DeepSpeedCPUAdam(params, lr=1e-3, adamw_mode=True)


def whole_path(total: int, rounds: int) -> None:
    shapes = transformer_shapes(total)
    masters = filled(shapes, torch.float32, 0.02)
    grads, params = filled(shapes, torch.bfloat16, 1e-3), filled(shapes, torch.bfloat16, 0.02)
    numel = sum(master.numel() for master in masters)
    half = max(numel // 2, 1)
    source, target = torch.zeros(half), torch.zeros(half)
    arguments = (masters, grads, params)
    contestants = {
        "roundpipe": Contestant(roundpipe_path(*arguments, torch.float32), 28 * numel),
        "roundpipe, bfloat16 moments": Contestant(
            roundpipe_path(*arguments, torch.bfloat16), 20 * numel
        ),
        "torch fused, conversions": Contestant(
            converting_path(lambda p: torch.optim.AdamW(p, fused=True), *arguments), 28 * numel
        ),
        "copy": Contestant(lambda: target.copy_(source), 8 * half),
    }
    if (deepspeed := deepspeed_adam()) is not None:
        contestants["DeepSpeed, conversions"] = Contestant(
            converting_path(deepspeed, *arguments), 28 * numel
        )
    take_turns(contestants, rounds)
    print(f"\nAdamW, {numel:,} parameters in {len(shapes)} tensors, bfloat16 in and out")
    print(f"{'':30}{'wall ms':>9}{'GB/s':>7}{'cpu ms':>9}{'GB/s':>7}   of roundpipe's time")
    best = contestants["roundpipe"]
    for name, one in contestants.items():
        wall, busy = min(one.wall_s), min(one.busy_s) / torch.get_num_threads()
        speeds = [one.traffic_bytes / seconds / 1e9 for seconds in (wall, busy)]
        ratios = min(one.wall_s) / min(best.wall_s), min(one.busy_s) / min(best.busy_s)
        text = "" if name == "copy" else f"   {ratios[0]:5.2f} wall, {ratios[1]:5.2f} cpu"
        print(f"{name:30}{wall * 1e3:9.1f}{speeds[0]:7.1f}{busy * 1e3:9.1f}{speeds[1]:7.1f}{text}")
    copy = contestants["copy"]
    wall_share, busy_share = (
        best.traffic_bytes / min(mine) / (copy.traffic_bytes / min(theirs))
        for mine, theirs in ((best.wall_s, copy.wall_s), (best.busy_s, copy.busy_s))
    )
    print(f"roundpipe runs at {wall_share:.0%} of copy bandwidth (cpu time: {busy_share:.0%})")


def every_optimizer(total: int, rounds: int) -> None:
    shapes = transformer_shapes(total)
    params = filled(shapes, torch.float32, 0.02)
    numel = sum(param.numel() for param in params)
    for param in params:
        param.requires_grad_()
        param.grad = torch.empty_like(param).normal_(0, 1e-3)
    print(f"\nfloat32 steps, {numel:,} parameters: cpu ms, best of {rounds}")
    for name in optim.__all__:
        theirs = getattr(torch.optim, name, None)
        if theirs is None:
            continue
        more: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        contestants = {"roundpipe": Contestant(getattr(optim, name)(params, **more).step, 0)}
        contestants["torch"] = Contestant(theirs(params, **more).step, 0)
        if "fused" in theirs(params).defaults:
            contestants["torch fused"] = Contestant(theirs(params, fused=True, **more).step, 0)
        take_turns(contestants, rounds)
        times = {label: min(one.busy_s) * 1e3 for label, one in contestants.items()}
        print(f"{name:10}" + "".join(f"   {label} {ms:8.1f}" for label, ms in times.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = load_kernels()
    isa = kernels.isa.name if kernels is not None else "none"
    print(f"torch {torch.__version__}, {arguments.threads} threads, kernels: {isa}")
    whole_path(int(arguments.parameters), arguments.rounds)
    every_optimizer(int(arguments.parameters / 10), arguments.rounds)


if __name__ == "__main__":
    main()
