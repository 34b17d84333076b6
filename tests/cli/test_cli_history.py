"""The metrics file and the plot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from roundpipe.cli.history import HeldOutRecord, History, StepRecord, plot_losses


def step(number: int) -> StepRecord:
    return StepRecord(number, loss=1 / number, lr=1e-7 / 3, num_tokens=100, seconds=0.5)


def lines(file: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_step_is_written_once_its_update_is_done() -> None:
    file = io.StringIO()
    history = History(file)
    history.add_step(step(1))
    history.updates_done([])
    assert lines(file) == []
    history.add_step(step(2))
    history.updates_done([0.5])
    history.updates_done([0.5])
    assert [line["step"] for line in lines(file)] == [1]
    history.updates_done([0.5, 0.25])
    history.add_held_out(HeldOutRecord(2, 3.0, 1.0))
    assert [(line["event"], line["step"]) for line in lines(file)] == [
        ("step", 1),
        ("step", 2),
        ("held_out", 2),
    ]
    assert [line.get("grad_norm") for line in lines(file)] == [0.5, 0.25, None]
    assert [record.grad_norm for record in history.steps] == [0.5, 0.25]


def test_losses_and_rates_are_written_exactly() -> None:
    file = io.StringIO()
    history = History(file)
    history.add_step(step(3))
    history.updates_done([1 / 3])
    (line,) = lines(file)
    assert (line["loss"], line["lr"], line["grad_norm"]) == (1 / 3, 1e-7 / 3, 1 / 3)
    assert line["tokens_per_s"] == 200


def test_a_step_too_short_to_measure_has_no_speed() -> None:
    assert StepRecord(1, 1.0, 1.0, 100, 0.0).tokens_per_s == 0.0


def test_the_plot_is_a_png_of_some_size(tmp_path: Path) -> None:
    history = History(io.StringIO())
    history.add_held_out(HeldOutRecord(0, 3.0, 1.0))
    for number in range(1, 9):
        history.add_step(step(number))
    history.add_held_out(HeldOutRecord(8, 2.0, 1.0))
    path = tmp_path / "loss.png"
    plot_losses(history, "a title", path)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    assert width >= 600
    assert height >= 300
