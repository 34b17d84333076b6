"""The Python of docs/plans.md runs, its costs file is one, and its example's script works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_python_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    whole = [block for block in blocks("python") if "(...," not in block]
    assert len(whole) == len(blocks("python")) - 1
    for block in whole:
        exec(compile(block, "docs/plans.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "measured costs of 6 layers" in printed
    assert "BubbleAccount" in printed
    assert "one iteration takes" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        "costs.json", "timeline.png", "trace.json",
    }  # fmt: skip
    names["model"].close()  # type: ignore[attr-defined]


def test_the_costs_file_on_the_page_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = blocks("json")
    (tmp_path / "costs.json").write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path / "costs.json")]) == 0
    assert "my model: 2 layers, 8 devices, 16 microbatches, async" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--wide"]])
def test_the_worked_example_runs(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "benchmarks/bottleneck.py", "--scale", "0.01", "--folder", tmp_path,
         *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: measured costs of 7 layers" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "costs.json", "timeline.png", "trace.json",
    }  # fmt: skip
