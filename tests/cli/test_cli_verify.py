"""``roundpipe verify``: a Python file, a saved model, and what cannot be used."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from roundpipe.cli import main

GOOD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        "inputs": torch.ones(4, 3),
        "label": torch.zeros(4, 3),
        "loss_fn": lambda output, label: ((output - label) ** 2).sum(),
        "num_microbatches": (2,),
    }

def counting():
    class Counter(nn.Linear):
        calls = 0
        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 3), Counter(3, 3))
    return model, torch.ones(4, 3), None, lambda output, label: output.sum()

def nothing():
    return None

def misspelt():
    return {**build(), "num_microbatch": (2,)}

def alien():
    return {**build(), "q": 3}

def no_module():
    return {**build(), "model": 3}

def frozen():
    return {**build(), "model": nn.Linear(3, 3).requires_grad_(False)}

def failing():
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_model.py"
    path.write_text(GOOD)
    return str(path)


def test_a_good_model_is_equal(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", file]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Equal: outputs, losses, gradients and buffers")
    assert "2 runs compared" in printed


def test_a_fault_is_told_and_is_an_exit_code(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", file, "--function", "counting", "--devices", "cpu:1"]
    assert main([*arguments, "--microbatches", "2"]) == 1
    printed = capsys.readouterr().out
    assert "layer 1 (Counter) writes to an attribute during forward: self.calls" in printed


def test_a_saved_model_of_transformers(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(model_folder), "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.startswith("Equal: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py: there is no such file"),
        (["--function", "absent"], r"has no function absent\(\); write one that returns a dict"),
        (["--function", "nothing"], r"nothing\(\) returned a NoneType; return a dict with model"),
        (["./nowhere"], "error: './nowhere': there is no such file or folder"),
        (["--function", "misspelt"], "'num_microbatch', which is unknown; did you mean 'num_micr"),
        (["--function", "alien"], "with 'q', which is unknown; known are model, inputs"),
        (["--function", "no_module"], "model is a int; give an nn.Module"),
        (["--function", "frozen"], "nothing requires a gradient"),
        (["--function", "failing"], r"my_model.py, line \d+: ZeroDivisionError: division by zero"),
        (["--microbatches", "2", "0"], "--microbatches has 0; expected numbers of at least 1"),
        (["--devices", "cpu:x"], "'x' is not a number"),
    ],
)
def test_what_cannot_be_used(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [file] if arguments[0].startswith("--") else []
    assert main(["verify", *source, *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef (\n", "broken.py, line 2: SyntaxError: "),
        ("\nimport not_there_at_all", "broken.py, line 2: ModuleNotFoundError: No module named"),
    ],
)
def test_a_file_that_does_not_run(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert main(["verify", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_no_tokenizer_is_needed(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, tmp_path)
    assert main(["verify", str(tmp_path), "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.startswith("Equal: ")
