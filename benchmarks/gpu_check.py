"""What wants a real accelerator: device contract, equality with the CPU, a short benchmark.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --fake    # a rehearsal on the fake accelerator of the tests

Prints what it found and exits with 1 if a check failed; without an accelerator it says so.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from engine import Shape, batch_of, build, loss_of, optimizer_for

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import open_pool

ROOT = Path(__file__).resolve().parent.parent
# The files that `python -m support.suite` runs on the fake accelerator: contract of the
# devices, equality with a plain loop, faults, versions.
SUITES = ("tests/devices", "tests/transparency", "tests/ordering", "tests/failure")
TEST_LIMIT_S = 330


def run_suites(*options: str) -> bool:
    """The suites that run on whatever accelerator is there."""
    command = [sys.executable, "-m", "pytest", *options, "-m", "not slow", "-k", "accelerator"]
    command += SUITES
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    print("$", " ".join(command[1:]), flush=True)
    try:
        outcome = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, timeout=TEST_LIMIT_S
        )
        return outcome.returncode == 0
    except subprocess.TimeoutExpired:
        print(f"the suites were not done after {TEST_LIMIT_S} s")
        return False


REAL = Shape(layers=16, hidden=1024, heads=16, vocabulary=8192, sequence=512, batch=16,
             microbatches=4)  # fmt: skip
REHEARSAL = Shape(layers=2, hidden=32, heads=2, vocabulary=64, sequence=8, batch=4,
                  microbatches=4)  # fmt: skip


def benchmark(device: torch.device, shape: Shape) -> None:
    """Tokens per second and peak memory through roundpipe, and with everything on the device."""
    tokens, labels = batch_of(shape)
    pool = open_pool([device])
    pipe = RoundPipe(build(shape), model_run_config=RoundPipeRunConfig(num_microbatch=4),
                     devices=pool, name="bench")  # fmt: skip
    with OptimizerCtx():
        optimizer = optimizer_for(pipe.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def through_roundpipe() -> None:
        pipe.forward_backward((tokens,), label=labels, loss_fn=loss_of)
        pipe.step(step)

    resident = build(shape).to(device)
    inner = torch.optim.AdamW(resident.parameters(), lr=1e-4)
    on_device, labels_on_device = tokens.to(device), labels.to(device)

    def all_on_device() -> None:
        pieces = zip(on_device.chunk(4), labels_on_device.chunk(4), strict=True)
        for piece, label in pieces:
            loss_of(resident(piece), label).backward()
        inner.step()
        inner.zero_grad()

    for name, iterate in (("roundpipe", through_roundpipe), ("all on device", all_on_device)):
        for _ in range(2):
            iterate()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            iterate()
            torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - begin)
        rate = shape.tokens / statistics.median(seconds)
        peak = torch.accelerator.max_memory_allocated() / 2**20
        print(f"{name:14} {rate:9.0f} tokens/s, peak {peak:.0f} MiB, seconds {seconds}")
    pipe.close()
    pool.close()


def main() -> int:
    is_rehearsal = "--fake" in sys.argv[1:]
    if is_rehearsal:
        sys.path.insert(0, str(ROOT / "tests"))
        from support import fakeacc

        if (problem := fakeacc.missing_requirement()) is not None:
            print(f"no rehearsal: {problem}")
            return 0
        fakeacc.load()
    if not torch.accelerator.is_available():
        print("no accelerator on this machine: there is nothing for gpu-check to check")
        return 0
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return 1
    device = torch.device(accelerator.type, 0)
    print(f"torch {torch.__version__}, {torch.accelerator.device_count()} x {device.type}")
    passed = run_suites(*(("-p", "support.fakeacc.plugin") if is_rehearsal else ()))
    benchmark(device, REHEARSAL if is_rehearsal else REAL)
    print("gpu-check:", "passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
