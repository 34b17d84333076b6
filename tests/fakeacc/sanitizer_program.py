"""Run by test_sanitizer.py under AddressSanitizer: everything that moves memory about at once."""

import contextlib
import gc
import threading
from pathlib import Path
from typing import get_args

import torch

from support import fakeacc
from support.fakeacc.streaming import Omission, StreamingPipeline


def stream_weights() -> None:
    """The pipeline, right and with every omission: wrong waits must not be wrong memory."""
    weights = [torch.randn(16, 16) / 4 for _ in range(6)]
    for omission in (None, *get_args(Omission)):
        for seed in range(3):
            with fakeacc.latency(jitter_ms=0.5, seed=seed):
                StreamingPipeline(weights, omission).step(torch.randn(8, 16))
        fakeacc.drain()
        torch.accelerator.empty_cache()
        torch.accelerator.empty_host_cache()


def allocate_in_threads() -> None:
    def work(index: int) -> None:
        device = f"fakeacc:{index % 2}"
        with torch.Stream(device):
            for size in range(1, 60):
                x = torch.ones(size * 37, device=device)
                x.resize_(size * 74)
                (x[: size * 37] * 2).sum().item()
                if size % 7 == 0:
                    torch.accelerator.empty_cache()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fail_in_every_way() -> None:
    x = torch.zeros(4, device="fakeacc:0")
    x.index_select(0, torch.tensor([9], device="fakeacc:0"))
    with contextlib.suppress(torch.AcceleratorError):
        fakeacc.drain()
    with fakeacc.memory_limit(0, 1 << 20):
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 20, device="fakeacc:0")


def train() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.GELU(), torch.nn.Flatten())
    model.to("fakeacc:1")
    with torch.autocast("fakeacc", dtype=torch.bfloat16):
        loss = model(torch.randn(2, 3, 8, device="fakeacc:1")).float().square().mean()
    loss.backward()


def main() -> None:
    if "libasan" not in Path("/proc/self/maps").read_text():
        raise SystemExit("AddressSanitizer is not loaded")
    fakeacc.load(2, sanitizer="address")
    for part in (stream_weights, allocate_in_threads, fail_in_every_way, train):
        part()
        gc.collect()
        fakeacc.drain()
    print("clean")  # noqa: T201 - the test waits for this word


if __name__ == "__main__":
    main()
