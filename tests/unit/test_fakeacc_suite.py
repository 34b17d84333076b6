"""The command that runs everything on the fake accelerator, where there can be none."""

from __future__ import annotations

import sys

import pytest

from support.fakeacc import suite


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "missing_requirement", lambda: "there is no g++")
    monkeypatch.setattr(sys, "argv", ["suite"])


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("ci", "exit_code"), [(None, 0), ("true", 1)])
def test_it_is_left_out_with_a_reason_and_fails_in_ci(
    ci: str | None,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    assert suite.main() == exit_code
    assert "left out: there is no g++" in capsys.readouterr().out


def test_a_run_that_fails_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    good = suite.Run("nothing but a question", ("--version",))
    bad = suite.Run("no such option", ("--no-such-option",))
    assert suite.run_all([good])
    assert not suite.run_all([bad, good])
    out = capsys.readouterr().out
    assert "fake accelerator, no such option: FAILED (exit code 4)" in out
    assert "fake accelerator, nothing but a question: passed" in out
