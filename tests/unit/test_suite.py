"""The command that runs all tests: it leaves none out, and says what failed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from support import suite
from support.suite import ACCELERATED, ORDINARY, ROOT, Run


def files_of(run: Run) -> set[str]:
    """The test files below the folders that a run names."""
    left_out = [a.removeprefix("--ignore=") for a in run.arguments if a.startswith("--ignore=")]
    folders = [argument for argument in run.arguments if argument.startswith("tests/")]
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("test_*.py")
        if not any(path.is_relative_to(ROOT / each) for each in left_out)
    }


def test_every_test_file_is_in_one_run() -> None:
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(there) > 100
    on_its_own = {name for name in there if name.startswith("tests/fakeacc/")}
    counts = Counter(name for run in ORDINARY for name in files_of(run))
    assert counts == Counter(there - on_its_own)
    assert any(files_of(run) == on_its_own for run in ACCELERATED)


@pytest.mark.parametrize(("ci", "exit_code"), [(None, 0), ("true", 1)])
def test_without_a_compiler_a_part_is_left_out_with_a_reason_and_that_fails_in_ci(
    ci: str | None,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[Run] = []

    def take(runs: tuple[Run, ...]) -> bool:
        begun.extend(runs)
        return True

    monkeypatch.setattr(suite, "missing_requirement", lambda: "there is no g++")
    monkeypatch.setattr(suite, "run_all", take)
    monkeypatch.setattr(sys, "argv", ["suite"])
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    assert suite.main() == exit_code
    assert begun == list(ORDINARY)
    out = capsys.readouterr().out
    assert "left out: there is no g++" in out
    assert out.splitlines()[-1].startswith("FAILED" if ci else "passed")


def test_a_run_that_fails_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    good = Run("nothing but a question", ("--version",))
    bad = Run("no such option", ("--no-such-option",))
    assert suite.run_all([good])
    assert not suite.run_all([bad, good])
    out = capsys.readouterr().out
    assert "no such option: FAILED (exit code 4)" in out
    assert "nothing but a question: passed" in out


def test_a_build_that_fails_fails_the_command_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("the compiler refused")

    monkeypatch.setattr(suite, "build", refuse)
    begun: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: begun.append(command))
    with pytest.raises(RuntimeError, match="the compiler refused"):
        suite.run_all([Run("on it", (), 1, needs_build=True)])
    assert begun == []
