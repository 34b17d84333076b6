"""What running the library's forward once for the prefix and once for the tail costs.

    python benchmarks/replay.py [--rows 2] [--length 256] [--device cpu]

Replay is what prefix and tail take beyond the work that the whole model does there, too: embedding,
final norm, head and loss. It is host time and does not depend on the width, so a narrow model
with the layers of a 1.2 billion parameter Llama is timed. The compute of such a model's microbatch
is timed on one layer of the real width: forward, recompute and backward, times the layers. The head
is left out, which makes the share look larger than it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe.hf import CutModel, cut_model

LAYERS = 16
ROUNDS = 9


def model_of(width: int, layers: int, device: str) -> Any:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config).to(device)


def batch_of(rows: int, length: int, device: str, padding: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1000, (rows, length), device=device)
    mask = torch.ones_like(ids)
    if padding:
        mask[-1, -padding:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def milliseconds(function: Callable[[], Any], device: str, rounds: int = ROUNDS) -> float:
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def replay(batch: dict[str, torch.Tensor], device: str) -> float:
    """Prints the parts, and returns their sum in ms for a microbatch that is trained on.

    The prefix runs twice, forward and recompute; the tail once, because the last stage's forward
    and backward are fused.
    """
    model = model_of(64, LAYERS, device)
    cut = cut_model(model)
    start = time.perf_counter()
    cut_model(model)
    wrap_ms = 1e3 * (time.perf_counter() - start)
    prefix, tail = cut.layers[0], cut.layers[-1]
    state = through_layers(cut, batch)
    hidden = next(t for n, t in state.tensors.items() if n.startswith("c"))
    inner = model.model

    def bare_tail() -> Any:
        logits = model.lm_head(inner.norm(hidden))
        return model.loss_function(logits, batch["labels"], 1000)

    prefix_ms = milliseconds(lambda: prefix(**batch), device)
    tail_ms = milliseconds(lambda: tail(state), device)
    bare = milliseconds(lambda: inner.embed_tokens(batch["input_ids"]), device)
    bare_ms = milliseconds(bare_tail, device)
    total = 2 * (prefix_ms - bare) + (tail_ms - bare_ms)
    print(f"prefix {prefix_ms:.1f} ms, of which embedding {bare:.1f}")
    print(f"tail {tail_ms:.1f} ms, of which norm, head and loss {bare_ms:.1f}")
    print(f"replay of a microbatch {total:.1f} ms; cutting the model took {wrap_ms:.0f} ms")
    return total


def through_layers(cut: CutModel, batch: dict[str, torch.Tensor]) -> Any:
    state = cut.layers[0](**batch)
    for piece in list(cut.layers)[1:-1]:
        state = piece(state)
    return state


def compute(batch: dict[str, torch.Tensor], device: str) -> float:
    """Forward, recompute and backward of all layers, in ms."""
    cut = cut_model(model_of(2048, 1, device))
    prefix, layer = cut.layers[0], cut.layers[1]
    state = prefix(**batch)

    def train() -> None:
        with torch.no_grad():
            layer(state)
        output = layer(state)
        next(t for n, t in output.tensors.items() if n.startswith("c")).sum().backward(
            retain_graph=True
        )

    ms = milliseconds(train, device, 1 if device == "cpu" else ROUNDS)
    print(f"one layer of width 2048: {ms:.0f} ms, {LAYERS} of them {LAYERS * ms:.0f} ms")
    return LAYERS * ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    total = 0.0
    for padding in (0, args.length // 4):
        print("with padding:" if padding else "without padding:")
        total = replay(batch_of(args.rows, args.length, args.device, padding), args.device)
    ms = compute(batch_of(args.rows, args.length, args.device, 0), args.device)
    print(f"replay is {100 * total / ms:.2f} % of the compute of {args.rows * args.length} tokens")


if __name__ == "__main__":
    main()
