"""The loss over a large vocabulary: in chunks, with all logits, and by torch's own function.

    python benchmarks/head.py [--tokens 1024] [--vocabulary 32000] [--features 512] [--device cpu]

Forward and backward; each way in a process of its own on the CPU, because memory is the growth of
resident memory there. The ways differ in the loss's last digits: the last column is its relative
distance to the loss in 64 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roundpipe.hf.chunked_loss import ChunkedLoss, chunked_cross_entropy, rows_per_chunk

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    rows = rows_per_chunk(len(weight), weight.device)
    loss = ChunkedLoss((Tensor.float,), -100, rows)
    return chunked_cross_entropy(hidden, weight, None, target, loss) / len(target)


def of_torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, target, options=options)


WAYS: dict[str, Way] = {"all logits": all_logits, "chunks": chunked, "torch": of_torch}


def measure(way: Way, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    weight = (torch.randn(args.vocabulary, args.features) * 0.05).to(device, dtype)
    hidden = torch.randn(args.tokens, args.features).to(device, dtype)
    target = torch.randint(0, args.vocabulary, (args.tokens,)).to(device)
    exact = torch.stack(
        [
            F.cross_entropy(h.double() @ weight.double().t(), t, reduction="sum")
            for h, t in zip(hidden.split(64), target.split(64), strict=True)
        ]
    ).sum() / len(target)
    weight.requires_grad_()
    hidden.requires_grad_()
    way(hidden[:8], weight, target[:8]).backward()
    times, peaks = [], []
    for _ in range(args.rounds):
        weight.grad = hidden.grad = None
        _forget_peak(device)
        before, start = _memory(device, "VmRSS"), time.perf_counter()
        loss = way(hidden, weight, target)
        loss.backward()
        _wait(device)
        times.append(time.perf_counter() - start)
        peaks.append(_memory(device, "VmHWM") - before)
    off = abs(float(loss.detach()) - float(exact)) / float(exact)
    return {"seconds": min(times), "peak_bytes": max(peaks), "off": off}


def _forget_peak(device: torch.device) -> None:
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def _memory(device: torch.device, name: str) -> int:
    if device.type == "cpu":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
    if name == "VmRSS":
        return torch.accelerator.memory_allocated(device)
    return torch.accelerator.max_memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=list(WAYS), help="only this, as one line of JSON")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(WAYS[args.way], args)))
        return
    logits_bytes = 4 * args.tokens * args.vocabulary
    print(f"{args.tokens} x {args.vocabulary} logits: {logits_bytes / 2**20:.0f} MiB in 32 bits")
    for name in WAYS:
        if name == "torch" and not hasattr(F, "linear_cross_entropy"):
            continue
        command = [sys.executable, *sys.argv, "--way", name]
        values = _run(command, {})
        # Freed memory goes back to the system at once, or the peak would hide in what is left over.
        peak = _run(command, {"MALLOC_MMAP_THRESHOLD_": "65536"})["peak_bytes"]
        print(
            f"{name:11} {values['seconds'] * 1e3:8.0f} ms {peak / 2**20:8.0f} MiB "
            f"({100 * peak / logits_bytes:.0f} % of the logits), loss off by {values['off']:.0e}"
        )


if __name__ == "__main__":
    main()
