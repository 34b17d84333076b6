"""What happened during a run: records, the metrics file, the plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class StepRecord:
    """One training step.

    Attributes:
        step: counted from 1.
        loss: mean over the batch's predicted tokens, before this step's update.
        lr: learning rate of this step's update.
        num_tokens: tokens in the batch, without padding.
        seconds: wall time of the step.
        grad_norm: of the whole gradient, before clipping; ``None`` until the update is done.
    """

    step: int
    loss: float
    lr: float
    num_tokens: int
    seconds: float
    grad_norm: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The step's speed."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class HeldOutRecord:
    """A held-out loss: after ``step`` updates, and how long it took."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    continuation: str


@dataclass
class History:
    """The records of a run, in order; steps and held-out losses also go into a file, as lines.

    A step is written once its update is done, which with asynchronous steps is one step later.
    """

    file: IO[str]
    steps: list[StepRecord] = field(default_factory=list)
    held_out: list[HeldOutRecord] = field(default_factory=list)
    _num_written: int = 0

    def add_step(self, record: StepRecord) -> None:
        """Note a step whose update may still be under way."""
        self.steps.append(record)

    def add_held_out(self, record: HeldOutRecord) -> None:
        """Note a held-out loss."""
        self.held_out.append(record)
        self._write("held_out", asdict(record))

    def updates_done(self, grad_norms: Sequence[float]) -> None:
        """Complete and write the steps whose updates are done."""
        for index in range(self._num_written, min(len(grad_norms), len(self.steps))):
            record = replace(self.steps[index], grad_norm=grad_norms[index])
            self.steps[index] = record
            self._write("step", {**asdict(record), "tokens_per_s": record.tokens_per_s})
            self._num_written += 1

    def _write(self, event: str, values: dict[str, float | None]) -> None:
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        # Losses and rates keep all their digits: they are compared between runs.
        exact = {k: values[k] for k in ("loss", "lr", "grad_norm") if k in values}
        self.file.write(json.dumps({"event": event, **rounded, **exact}) + "\n")
        self.file.flush()


def plot_losses(history: History, title: str, path: Path) -> None:
    """Draw the training and held-out losses over the steps into a PNG."""
    # The object interface leaves pyplot's process-wide state alone and needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [record.step for record in history.steps],
        [record.loss for record in history.steps],
        color="#9bb4d0",
        linewidth=1.2,
        label="training, each step",
    )
    axes.plot(
        [record.step for record in history.held_out],
        [record.loss for record in history.held_out],
        color="#c2452d",
        linewidth=2,
        marker="o",
        label="held out",
    )
    for record in (history.held_out[0], history.held_out[-1]):
        axes.annotate(
            f"{record.loss:.3f}",
            (record.step, record.loss),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
        )
    axes.set(title=title, xlabel="step", ylabel="loss per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)
