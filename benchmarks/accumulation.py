"""What accumulating many microbatches' gradients in bfloat16 costs, and in float32.

Run ``python benchmarks/accumulation.py``; it takes seconds. A bfloat16 network of linear layers and
GELUs; errors are Frobenius norms over all weights, relative to a loop in float64 over the same
(bfloat16) weights and inputs. The last row is what no way of accumulating can better: each
microbatch's gradient as bfloat16 layers compute it, summed in float64.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig


def build(width: int, depth: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers)


def loss_of(output: Tensor, label: Tensor) -> Tensor:
    return ((output - label) ** 2).mean()


def loop(model: nn.Sequential, x: Tensor, y: Tensor, count: int, sums: torch.dtype) -> list[Tensor]:
    """Gradients of the microbatches, summed in ``sums``."""
    totals = [torch.zeros_like(p, dtype=sums) for p in model.parameters()]
    for piece, label in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        model.zero_grad()
        loss_of(model(piece), label).backward()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad.to(sums)
    model.zero_grad()
    return totals


def through_roundpipe(
    model: nn.Sequential, x: Tensor, y: Tensor, count: int, dtype: torch.dtype | None
) -> list[Tensor]:
    config = RoundPipeRunConfig(num_microbatch=count)
    with RoundPipe(model, devices="cpu:2", model_run_config=config, accumulate_dtype=dtype) as pipe:
        pipe.forward_backward((x,), label=y, loss_fn=loss_of)
        pipe.synchronize()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


def error(grads: list[Tensor], exact: list[Tensor]) -> float:
    wrong = sum(float((g.double() - e).square().sum()) for g, e in zip(grads, exact, strict=True))
    return float((wrong / sum(float(e.square().sum()) for e in exact)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    count = arguments.microbatches
    model = build(arguments.width, arguments.depth).bfloat16()
    x, y = (torch.randn(8 * count, arguments.width).bfloat16() for _ in range(2))
    exact = loop(copy.deepcopy(model).double(), x.double(), y.double(), count, torch.float64)
    rows = {
        "in bfloat16 (default)": through_roundpipe(model, x, y, count, None),
        "accumulate_dtype=float32": through_roundpipe(model, x, y, count, torch.float32),
        "plain loop, .grad in bfloat16": loop(model, x, y, count, torch.bfloat16),
        "the layers' own error": loop(model, x, y, count, torch.float64),
    }
    print(f"{count} microbatches, error relative to float64")
    for name, grads in rows.items():
        print(f"{name:32}{error(grads, exact):9.5f}")


if __name__ == "__main__":
    main()
