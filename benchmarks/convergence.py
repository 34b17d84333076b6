"""What staleness of one step costs: loss curves of synchronous, layer-wise and asynchronous steps.

Run ``python benchmarks/convergence.py``. The main job's model, data and learning rate (see
``recipes/smollm2-python.yaml``) with short sequences; every way starts from the same weights and
sees the same batches. Writes a plot and prints a table of means over the steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.cli.batches import (
    Batch,
    encode,
    evaluation_batches,
    pad_token_id,
    training_batches,
)
from roundpipe.cli.documents import read_corpus
from roundpipe.cli.model_source import find_model, load_model
from roundpipe.cli.recipe import Recipe
from roundpipe.cli.recipe_file import read_recipe
from roundpipe.cli.training import LossTail, model_inputs
from roundpipe.hf import cut_model

WAYS = ("synchronous", "layer by layer", "asynchronous")


class Study:
    """The model with its data, and the curves of the ways to step."""

    def __init__(self, recipe: Recipe, arguments: argparse.Namespace) -> None:
        loaded = load_model(find_model(recipe.model.source), torch.float32)
        corpus = read_corpus(recipe.data)
        length, size = arguments.tokens, arguments.sequences
        train, held_out = (
            encode(documents, loaded.tokenizer, length)
            for documents in (corpus.train, corpus.held_out)
        )
        pad_id = pad_token_id(loaded.tokenizer)
        batches: Iterator[Batch] = training_batches(train, size, pad_id, recipe.seed)
        self.batches = [next(batches) for _ in range(arguments.steps)]
        self.held_out = evaluation_batches(held_out, size, pad_id, arguments.held_out)
        self.cut = cut_model(loaded.model)
        self.start = {k: v.clone() for k, v in loaded.model.state_dict().items()}
        self.model = loaded.model
        self.lr = recipe.optimizer.lr
        self.max_norm = recipe.training.clip_norm or 1.0

    def run(self, way: str) -> tuple[list[float], float]:
        """Each step's training loss, and the held-out loss at the end."""
        self.model.load_state_dict(self.start)
        self._set_mode(training=True)
        *layers, tail = self.cut.layers
        config = RoundPipeRunConfig(num_microbatch=2)
        losses = []
        with RoundPipe(
            nn.Sequential(*layers, LossTail(tail)), model_run_config=config, devices="cpu:2"
        ) as pipe:
            optimizer = optim.AdamW(pipe.optim_parameters(), lr=self.lr, weight_decay=0.0)

            def step() -> None:
                nn.utils.clip_grad_norm_(list(pipe.parameters()), self.max_norm)
                optimizer.step()
                optimizer.zero_grad()

            for batch in self.batches:
                losses.append(float(pipe.forward_backward(input_kwargs=model_inputs(batch))))
                if way == "layer by layer":
                    pipe.step(optimizer, max_norm=self.max_norm)
                else:
                    pipe.step(step, is_async=way == "asynchronous")
            pipe.synchronize()
            return losses, self._held_out_loss(pipe)

    def _held_out_loss(self, pipe: RoundPipe) -> float:
        self._set_mode(training=False)
        total, count = 0.0, 0
        config = RoundPipeRunConfig(merge_output=lambda losses: torch.stack(list(losses)).sum())
        with torch.no_grad():
            for batch in self.held_out:
                loss = pipe.forward(**model_inputs(batch), roundpipe_run_config=config)
                total, count = (
                    total + float(loss) * batch.num_predicted,
                    count + batch.num_predicted,
                )
        return total / count

    def _set_mode(self, training: bool) -> None:
        self.cut.model.train(training)
        self.cut.refresh_flags()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plot(curves: dict[str, list[float]], window: int, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for way, losses in curves.items():
        smooth = [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
        axes.plot(range(1, len(losses) + 1), smooth, label=way, alpha=0.8,
                  linestyle="--" if way == "layer by layer" else "-")  # fmt: skip
    axes.set(xlabel="step", ylabel=f"training loss, mean of {window} steps")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="recipes/smollm2-python.yaml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--plot", type=Path, default=Path("docs/convergence.svg"))
    arguments = parser.parse_args()
    study = Study(read_recipe(arguments.recipe), arguments)
    curves, held_out = {}, {}
    for way in WAYS:
        begin_s = time.perf_counter()
        curves[way], held_out[way] = study.run(way)
        print(f"{way}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    fifth = max(1, arguments.steps // 5)
    begins = range(0, fifth * 5, fifth)
    heads = "".join(f"{f'{b + 1}-{b + fifth}':>10}" for b in begins)
    print(f"\n{'training loss, steps':24}{heads}{'held-out':>10}")
    for way, losses in curves.items():
        parts = "".join(f"{mean(losses[b : b + fifth]):10.4f}" for b in begins)
        print(f"{way:24}{parts}{held_out[way]:10.4f}")
    same = curves["synchronous"] == curves["layer by layer"]
    print(f"layer by layer {'equals' if same else 'DIFFERS FROM'} synchronous, bitwise")
    plot(curves, 10, arguments.plot)


if __name__ == "__main__":
    main()
