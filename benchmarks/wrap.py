"""How long it takes to wrap a 32-layer model, without loading it.

    python benchmarks/wrap.py [--hidden 1024] [--layers 32]

Prints the first wrapping in the process, which imports what the library imports late, and the best
of three later ones.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig

from roundpipe import wrap_model_to_roundpipe
from roundpipe.hf import init_random


def wrap_seconds(model: torch.nn.Module) -> float:
    begin = time.perf_counter()
    pipe = wrap_model_to_roundpipe(model, True, devices="cpu:2", pin_model="off")
    seconds = time.perf_counter() - begin
    pipe.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=8,
        vocab_size=16000,
    )
    model = init_random(config, torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    first = wrap_seconds(model)
    later = min(wrap_seconds(model) for _ in range(3))
    threads = torch.get_num_threads()
    print(f"{arguments.layers} layers, {count / 1e6:.0f} M parameters, {threads} threads")
    print(f"first wrapping  {first:6.2f} s")
    print(f"later wrappings {later:6.2f} s")


if __name__ == "__main__":
    main()
