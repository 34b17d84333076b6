"""Splitting and merging: time against torch's functions (and paddle's), memory of a merge.

Run ``python benchmarks/microbatch.py``. The input is a nested tree of 50 leaves, tensors, numbers
and strings, cut into 8 pieces; the outputs are 8 trees of 50 leaves. Times are processor time on
one thread, the best of several rounds in which the contestants take turns. Where a spec is given,
both get the same one. ``ROUNDPIPE_PADDLE_PYTHON`` may name the Python of an environment with
paddlepaddle, whose function of the same name is then measured, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import timeit
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch.distributed.pipelining import microbatch as torch_microbatch

from roundpipe import microbatch

PIECES = 8
TENSORS, NUMBERS, STRINGS = 20, 20, 10
MIB = 2**20


def make_kwargs(make_tensor: Callable[[int], Any]) -> dict[str, Any]:
    """A tree of 50 leaves: ten records of two tensors, two numbers and a string."""
    return {
        f"record{i}": {
            "hidden": make_tensor(i),
            "extra": [make_tensor(i + 10), (i, float(i))],
            "name": f"name{i}",
        }
        for i in range(TENSORS // 2)
    }


def interleaved_best(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best time per call of each function, in seconds; the functions take turns."""
    number = {
        name: max(1, int(0.02 / timeit.timeit(f, timer=process_time, number=3) * 3))
        for name, f in functions.items()
    }
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            seconds = (
                timeit.timeit(function, timer=process_time, number=number[name]) / number[name]
            )
            best[name] = min(best[name], seconds)
    return best


def report(title: str, functions: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print the times; the first function is what the others are held against."""
    best = interleaved_best(functions, rounds)
    reference, reference_seconds = next(iter(best.items()))
    print(title)
    for name, seconds in best.items():
        ratio = seconds / reference_seconds
        print(f"  {name:<28}{seconds * 1e6:9.1f} us   {ratio:5.2f} of {reference}'s time")


def split_times(rounds: int) -> None:
    kwargs = make_kwargs(lambda i: torch.ones(16, 32 + i))
    replicate = torch_microbatch._Replicate()
    chunk = torch_microbatch.TensorChunkSpec(0)
    spec: Any = {
        key: {"hidden": chunk, "extra": [chunk, (replicate, replicate)], "name": replicate}
        for key in kwargs
    }
    ours, theirs = microbatch.split_args_kwargs_into_chunks, torch_microbatch
    leaves = TENSORS + NUMBERS + STRINGS
    report(
        f"split: {leaves} leaves into {PIECES} pieces, no spec",
        {
            "torch": lambda: theirs.split_args_kwargs_into_chunks((), kwargs, PIECES),
            "roundpipe": lambda: ours((), kwargs, PIECES),
            "roundpipe, split_batch": lambda: microbatch.split_batch((), kwargs, None, PIECES),
            "(the 20 tensor_splits alone)": lambda: [
                (r["hidden"].tensor_split(PIECES), r["extra"][0].tensor_split(PIECES))
                for r in kwargs.values()
            ],
        },
        rounds,
    )
    report(
        f"split: {leaves} leaves into {PIECES} pieces, spec",
        {
            "torch": lambda: theirs.split_args_kwargs_into_chunks((), kwargs, PIECES, None, spec),
            "roundpipe": lambda: ours((), kwargs, PIECES, None, spec),
        },
        rounds,
    )


def merge_times(rounds: int) -> None:
    kwargs = make_kwargs(lambda i: torch.ones(16, 32 + i))
    pieces = microbatch.split_args_kwargs_into_chunks((), kwargs, PIECES)[1]
    spec = {
        key: {
            "hidden": torch_microbatch.TensorChunkSpec(0),
            "extra": [torch_microbatch.TensorChunkSpec(0), (None, None)],
            "name": None,
        }
        for key in kwargs
    }
    report(
        f"merge: {PIECES} outputs of {TENSORS + NUMBERS + STRINGS} leaves (torch needs a spec)",
        {
            "torch": lambda: torch_microbatch.merge_chunks(pieces, spec),
            "roundpipe": lambda: microbatch.merge_chunks(pieces, spec),
            "roundpipe, no spec": lambda: microbatch.merge_chunks(pieces, None),
            "roundpipe, merge_outputs": lambda: microbatch.merge_outputs(pieces),
            "(the 20 cats alone)": lambda: [
                (
                    torch.cat([p[key]["hidden"] for p in pieces]),
                    torch.cat([p[key]["extra"][0] for p in pieces]),
                )
                for key in kwargs
            ],
        },
        rounds,
    )


def paddle_times(rounds: int) -> None:
    python = os.environ.get("ROUNDPIPE_PADDLE_PYTHON")
    if python is None:
        print(
            "paddle: not measured (ROUNDPIPE_PADDLE_PYTHON names no Python that has paddlepaddle)"
        )
        return
    program = Path(__file__).with_name("microbatch_paddle.py")
    result = subprocess.run(
        [python, str(program), str(PIECES), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        print(f"paddle: not measured ({result.stderr.strip().splitlines()[-1]})")
        return
    seconds = json.loads(result.stdout.strip().splitlines()[-1])["split"]
    kwargs = make_kwargs(lambda i: torch.ones(16, 32 + i))
    split = microbatch.split_args_kwargs_into_chunks
    ours = interleaved_best({"roundpipe": lambda: split((), kwargs, PIECES)}, rounds)["roundpipe"]
    print(
        f"split, no spec: paddle {seconds * 1e6:.1f} us in its own process, roundpipe "
        f"{ours * 1e6:.1f} us, {ours / seconds:.2f} of paddle's time"
    )


def peak_bytes() -> int:
    """Highest resident size of this process since the last reset."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def merge_memory() -> None:
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        print("memory of a merge: needs /proc, not measured")
        return
    outputs = [{"logits": torch.full((64, 2**18), float(m))} for m in range(PIECES)]
    output_bytes = sum(piece["logits"].nbytes for piece in outputs)
    reset.write_text("5")
    before = peak_bytes()
    merged = microbatch.merge_outputs(outputs)
    used = peak_bytes() - before
    assert merged["logits"].nbytes == output_bytes
    print(
        f"merge of {output_bytes / MIB:.0f} MiB: peak memory {used / MIB:.1f} MiB above the "
        f"pieces, {used / output_bytes - 1:+.2%} against the output"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    split_times(rounds)
    merge_times(rounds)
    paddle_times(rounds)
    merge_memory()


if __name__ == "__main__":
    main()
