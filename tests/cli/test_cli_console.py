"""What a person sees."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from roundpipe.cli.console import ConsoleReporter
from roundpipe.cli.history import HeldOutRecord, History, Sample, StepRecord


def reporter(
    total_steps: int = 4, terminal: bool = False, width: int = 60
) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, highlight=False, force_terminal=terminal, color_system=None,
        _environ={},
    )  # fmt: skip
    return ConsoleReporter("a.yaml", total_steps, console), out


def step(number: int) -> StepRecord:
    return StepRecord(number, loss=3.0 - number / 10, lr=5e-5, num_tokens=1000, seconds=0.5)


def rows(out: io.StringIO) -> list[list[str]]:
    """The table's lines, as columns."""
    split = [line.split() for line in out.getvalue().splitlines()]
    return [columns for columns in split if columns and columns[0].isdecimal()]


def test_a_short_run_gets_a_line_a_step_with_the_held_out_loss_next_to_it() -> None:
    console, out = reporter(total_steps=4)
    with console.training():
        console.held_out(HeldOutRecord(0, 3.5, 1.0))
        for number in range(1, 5):
            console.step(step(number))
            if number % 2 == 0:
                console.held_out(HeldOutRecord(number, 3.25, 1.0))
    assert rows(out) == [
        ["0", "3.500"],
        ["1", "2.900", "5.0e-05", "2,000"],
        ["2", "2.800", "3.250", "5.0e-05", "2,000"],
        ["3", "2.700", "5.0e-05", "2,000"],
        ["4", "2.600", "3.250", "5.0e-05", "2,000"],
    ]


def test_a_long_run_gets_about_a_dozen_lines() -> None:
    console, out = reporter(total_steps=1200)
    with console.training():
        console.held_out(HeldOutRecord(0, 3.5, 1.0))
        for number in range(1, 1201):
            console.step(step(number))
        console.held_out(HeldOutRecord(1200, 3.0, 1.0))
    assert [row[0] for row in rows(out)] == [str(number) for number in range(0, 1201, 100)]


def test_without_a_terminal_nothing_moves() -> None:
    console, out = reporter(terminal=False)
    with console.working("reading"):
        pass
    with console.training():
        console.step(step(1))
        with console.working("held-out loss"):
            pass
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert "reading" not in out.getvalue()


def test_on_a_terminal_a_spinner_and_a_bar_say_what_goes_on() -> None:
    console, out = reporter(terminal=True, width=100)
    with console.working("reading the model"):
        pass
    with console.training():
        console.step(step(1))
        with console.working("held-out loss"):
            pass
    assert "reading the model" in out.getvalue()
    assert "held-out loss" in out.getvalue()
    assert "step 1/4" in out.getvalue()


def test_facts_keep_their_indent_when_they_wrap() -> None:
    console, out = reporter(width=40)
    console.fact("data", "word " * 20)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if "word" in line]
    assert len(lines) > 2
    assert lines[0].startswith("  data       ")
    assert {line.index("word") for line in lines} == {13}


def test_generated_text_is_shown_as_it_is() -> None:
    console, out = reporter(width=100)
    console.sample("before", Sample("a [bold]prompt", " :smile: [/x] and more"))
    assert "a [bold]prompt :smile: [/x] and more" in out.getvalue()
    assert "sample before training" in out.getvalue()


def test_the_end_says_what_was_reached_and_where_it_lies(tmp_path: Path) -> None:
    console, out = reporter(width=100 + len(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2_500_000)
    (tmp_path / "recipe.yaml").write_bytes(b"x")
    history = History(io.StringIO())
    history.add_held_out(HeldOutRecord(0, 3.0, 1.0))
    history.add_step(StepRecord(1, 2.0, 5e-5, 9000, 90.0))
    history.add_held_out(HeldOutRecord(1, 2000.0, 1.0))
    console.saved(tmp_path, history)
    text = out.getvalue()
    assert "3.000 -> 2000.000   perplexity 20.1 -> huge" in text
    assert "9,000 tokens in 1 min 30 s, 100 tokens/s" in text
    assert "2.5 MB" in text
    assert "1 B" in text
    assert f'from_pretrained("{tmp_path}")' in text
