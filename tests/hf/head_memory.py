"""Prints what a training call of a model with a large vocabulary takes.

    python tests/hf/head_memory.py VOCABULARY TOKENS chunked|full|library

One microbatch on one CPU device. Memory is resident memory above that of an equal call on a few
tokens, so that weights and their gradients do not count. ``library`` only takes the plain model's
loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


def resident(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(vocabulary: int, tokens: int, head: str) -> dict[str, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
    )
    model: Any = LlamaForCausalLM(config)
    ids = torch.randint(0, vocabulary, (tokens // 256, 256))
    if head == "library":
        with torch.no_grad():
            return {"loss": float(model(input_ids=ids, labels=ids, use_cache=False).loss)}
    pipe: Any = wrap_model_to_roundpipe(
        model, True, devices="cpu:1", model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    with pipe:
        tail = pipe.model[-1]
        tail.lazy_from_bytes = 0 if head == "chunked" else 2**62
        pipe.forward_backward(input_kwargs={"input_ids": ids[:1, :8], "labels": ids[:1, :8]})
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before, start = resident("VmRSS"), time.perf_counter()
        loss = pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        seconds = time.perf_counter() - start
        peak_bytes = resident("VmHWM") - before
    return {"loss": float(loss), "peak_bytes": peak_bytes, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))  # noqa: T201
