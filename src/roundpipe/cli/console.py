"""The reporter that writes to a terminal, or quietly to a file or pipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from roundpipe.cli.history import HeldOutRecord, History, Sample, StepRecord

_NAME_WIDTH = 12
_LINES = 12  # about so many lines of steps, however long the run

_LOADING = "AutoModelForCausalLM.from_pretrained("


class ConsoleReporter:
    """Tells a person what happens.

    On a terminal with a progress bar; elsewhere the same lines without anything that moves.

    Args:
        title: printed first.
        total_steps: how many steps will come.
        console: where to write; standard output by default.
    """

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total_steps = total_steps
        self._every = max(1, total_steps // _LINES)
        self._progress: Progress | None = None
        self._last: StepRecord | None = None
        self._last_shown = 0
        self._console.print(Text.assemble(("roundpipe finetune", "bold"), "  ", (title, "cyan")))
        self._console.print()

    def working(self, on: str) -> AbstractContextManager[object]:
        """A spinner while it lasts; during training the bar says it."""
        if self._progress is not None:
            return self._on_the_bar(on)
        if not self._console.is_terminal:
            return nullcontext()
        return self._console.status(f"{on} ...", spinner="dots")

    def fact(self, name: str, value: str) -> None:
        """A line of the heading."""
        # A grid keeps the second column's indent where a narrow terminal wraps it.
        line = Table.grid(padding=(0, 1))
        line.add_column(width=_NAME_WIDTH)
        line.add_row(Text(f"  {name}", "dim"), Text(value))
        self._console.print(line)

    def sample(self, when: str, sample: Sample) -> None:
        """The prompt and its continuation, framed."""
        text = Text.assemble((sample.prompt, "bold"), sample.continuation.rstrip())
        self._console.print()
        self._console.print(
            Panel(text, title=f"sample {when} training", title_align="left", border_style="dim")
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """The table of steps, with the bar below it."""
        self._console.print()
        self._print(("    step      loss   held-out        lr   tokens/s", "dim"))
        columns = (
            TextColumn("  step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
        )
        show = self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not show) as bar:
            self._progress = bar
            self._task = bar.add_task("", total=self._total_steps, status="")
            try:
                yield
            finally:
                self._progress = None

    def step(self, record: StepRecord) -> None:
        """Moves the bar; some steps also become a line."""
        self._show_pending()
        self._last = record
        if self._progress is not None:
            status = f"loss {record.loss:.3f} · {record.tokens_per_s:,.0f} tokens/s ·"
            self._progress.update(self._task, completed=record.step, status=status)

    def held_out(self, record: HeldOutRecord) -> None:
        """A line with the held-out loss, and the step's figures next to it."""
        if record.step == 0:
            self._print(f"{0:>8}{'':>10}", (f"{record.loss:>11.3f}", "bold green"))
        elif self._last is not None:
            self._line(self._last, held_out=record.loss)
            self._last = None

    def saved(self, folder: Path, history: History) -> None:
        """What was reached and where it lies."""
        before, after = history.held_out[0].loss, history.held_out[-1].loss
        tokens = sum(record.num_tokens for record in history.steps)
        seconds = sum(record.seconds for record in history.steps)
        self._console.print()
        self._print(
            ("  held-out loss  ", "dim"),
            f"{before:.3f} -> ",
            (f"{after:.3f}", "bold green"),
            (f"   perplexity {_perplexity(before)} -> {_perplexity(after)}", "dim"),
        )
        self._print(
            ("  training       ", "dim"),
            f"{tokens:,} tokens in {_duration(seconds)}, {tokens / seconds:,.0f} tokens/s",
        )
        self._print(("  saved          ", "dim"), (str(folder), "cyan"))
        for path in sorted(folder.iterdir()):
            self._print(f"{'':17}", (f"{path.name:<26}{_size(path.stat().st_size):>9}", "dim"))
        self._console.print()
        is_adapter = (folder / "adapter_config.json").is_file()
        loading = "PeftModel.from_pretrained(base, " if is_adapter else _LOADING
        self._print(("  use it         ", "dim"), f'{loading}"{folder}")')

    @contextmanager
    def _on_the_bar(self, on: str) -> Iterator[None]:
        if self._progress is not None:
            self._progress.update(self._task, status=f"{on} ·")
            self._progress.refresh()
        yield

    def _show_pending(self) -> None:
        """The last step gets its line now, if it is its turn and no held-out loss came for it."""
        record = self._last
        if record is not None and record.step - self._last_shown >= self._every:
            self._line(record)

    def _line(self, record: StepRecord, held_out: float | None = None) -> None:
        self._last_shown = record.step
        held_out_text = "" if held_out is None else f"{held_out:.3f}"
        self._print(
            f"{record.step:>8}{record.loss:>10.3f}",
            (f"{held_out_text:>11}", "bold green"),
            (f"{record.lr:>10.1e}{record.tokens_per_s:>11,.0f}", "dim"),
        )

    def _print(self, *parts: str | tuple[str, str]) -> None:
        self._console.print(Text.assemble(*parts))


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 100 else "huge"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _size(size_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"
