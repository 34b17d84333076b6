"""The command from the recipe to the saved model, on a model that takes no time."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.tiny import make_model
from roundpipe.cli import main
from roundpipe.cli.console import ConsoleReporter
from roundpipe.cli.history import StepRecord
from roundpipe.cli.training import Trainer

FILES = {
    "config.json",
    "generation_config.json",
    "loss.png",
    "metrics.jsonl",
    "model.safetensors",
    "recipe.yaml",
    "tokenizer.json",
    "tokenizer_config.json",
}


def metrics(folder: Path, event: str, key: str) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row[key] for row in rows if row["event"] == event]


def finetune(recipe: Path, *overrides: str) -> int:
    return main(["finetune", str(recipe), *(["--set", *overrides] if overrides else [])])


def test_a_recipe_becomes_a_model_that_plain_transformers_loads(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = set(threading.enumerate())
    assert finetune(recipe_file) == 0
    assert set(threading.enumerate()) == threads
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "run"]

    assert metrics(run, "step", "step") == [1, 2, 3, 4]
    assert metrics(run, "held_out", "step") == [0, 2, 4]
    held_out = metrics(run, "held_out", "loss")
    assert held_out[-1] < held_out[0] - 0.1

    model = AutoModelForCausalLM.from_pretrained(run)
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert not torch.equal(model.lm_head.weight, make_model().lm_head.weight)
    inputs = tokenizer("while", return_tensors="pt")
    new = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    words = tokenizer.decode(new[0], skip_special_tokens=True)

    printed = capsys.readouterr()
    assert words in printed.out.replace("\n", "")
    assert f"{held_out[0]:.3f} -> {held_out[-1]:.3f}" in printed.out
    assert "sample before training" in printed.out
    assert printed.err == ""


def test_the_written_recipe_repeats_the_run_exactly(recipe_file: Path, tmp_path: Path) -> None:
    assert finetune(recipe_file, "training.steps=2", "seed=3") == 0
    again = tmp_path / "again"
    assert finetune(tmp_path / "run" / "recipe.yaml", f"output.folder={again}") == 0
    for event in ("step", "held_out"):
        assert metrics(again, event, "loss") == metrics(tmp_path / "run", event, "loss")
    assert finetune(recipe_file, "seed=4", f"output.folder={tmp_path / 'other'}") == 0
    first_of_others = metrics(tmp_path / "other", "step", "loss")[0]
    assert first_of_others != metrics(again, "step", "loss")[0]


def test_asynchronous_steps_learn_too(recipe_file: Path, tmp_path: Path) -> None:
    changes = ["training.async_step=true", "training.eval_every=0"]
    assert finetune(recipe_file, *changes) == 0
    assert metrics(tmp_path / "run", "held_out", "step") == [0, 4]
    assert metrics(tmp_path / "run", "step", "step") == [1, 2, 3, 4]
    assert all(norm > 0 for norm in metrics(tmp_path / "run", "step", "grad_norm"))
    before, after = metrics(tmp_path / "run", "held_out", "loss")
    assert after < before - 0.1


def test_chats_are_learned_and_answered_in_the_chat_template(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": word}]}
        for word in ("yes", "yes!")
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    changes = [f"data.source={chats}", "data.sequence_length=64", "sample.prompt=hi"]
    changes += ["training.steps=40", "optimizer.lr=3e-2", "training.eval_every=0"]
    assert finetune(recipe_file, *changes) == 0
    assert metrics(tmp_path / "run", "step", "loss")[-1] < 0.5
    after = capsys.readouterr().out.partition("sample after training")[2]
    assert "hiyes" in after


@pytest.mark.parametrize("earlier", [False, True])
def test_ctrl_c_saves_nothing_and_says_so(
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    earlier: bool,
) -> None:
    run = tmp_path / "run"
    if earlier:
        assert finetune(recipe_file) == 0
    content = {path: path.read_bytes() for path in run.glob("*")}
    threads = set(threading.enumerate())
    show = ConsoleReporter.step

    def press_ctrl_c(self: ConsoleReporter, record: StepRecord) -> None:
        show(self, record)
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ConsoleReporter, "step", press_ctrl_c)
    assert finetune(recipe_file, "output.overwrite=true") == 130
    message = f"Interrupted after 3 of 4 steps. Nothing was saved; {run} is as it was before."
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.glob("*")} == content
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.yaml", "run"}
    assert set(threading.enumerate()) == threads


def test_ctrl_c_while_loading(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("roundpipe.cli.job.load_model", load)
    assert finetune(recipe_file) == 130
    assert (
        "Interrupted before the first step was done. Nothing was saved" in capsys.readouterr().err
    )


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_nothing(
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_step = Trainer.train_step

    def blow_up(self: Trainer, batch: Any) -> float:
        loss = train_step(self, batch)
        return float("nan") if len(self.grad_norms) == 2 else loss

    monkeypatch.setattr(Trainer, "train_step", blow_up)
    assert finetune(recipe_file) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: the loss became nan in step 2; nothing was saved. Try")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainng.steps=3"], "trainng: no such key; did you mean 'training'?"),
        (["optimizer.name=adamw"], "there is no optimizer 'adamw'; did you mean 'AdamW'?"),
        (["model.source=./gone"], "model.source: './gone': there is no such file or folder"),
        (["data.source=gone.txt"], "data.source: gone.txt: there is no such file"),
        (["devices=cpu:x"], "devices='cpu:x': 'x' is not a number"),
        (["optimizer.options.eps=-1.0"], "optimizer: AdamW refuses: Invalid epsilon value"),
    ],
)
def test_a_bad_recipe_is_one_line_and_exit_code_2(
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    said: str,
) -> None:
    assert finetune(recipe_file, *overrides) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert said in printed
    assert printed.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_earlier_run_is_safe_unless_the_recipe_says_otherwise(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(recipe_file) == 0
    assert finetune(recipe_file) == 2
    assert "holds an earlier run; --set output.overwrite=true, or" in capsys.readouterr().err
    assert finetune(recipe_file, "output.overwrite=true", "training.steps=1") == 0
    assert metrics(tmp_path / "run", "step", "step") == [1]


def test_missing_libraries_are_named_with_what_installs_them(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundpipe.cli.commands.finetune._NEEDED", ("torch", "no_such_library"))
    assert finetune(recipe_file) == 2
    expected = "error: finetune needs no_such_library; run: pip install 'roundpipe[demo]'\n"
    assert capsys.readouterr().err == expected
