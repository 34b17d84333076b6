"""The command line around the commands: finding them, exit codes, light imports."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import pytest

from roundpipe import __version__
from roundpipe.cli import main
from roundpipe.cli.commands import find_commands
from roundpipe.cli.problems import CommandInterrupted, TrainingError, UsageError
from roundpipe.errors import add_note


class FakeCommand:
    """Says what it does, and does what it was given."""

    HELP = "does what it was given"

    def __init__(self, act: Callable[[], int]) -> None:
        self._act = act

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--flag", action="store_true")

    def run(self, arguments: argparse.Namespace) -> int:
        assert not arguments.flag
        return self._act()


def run_fake(monkeypatch: pytest.MonkeyPatch, act: Callable[[], int]) -> int:
    monkeypatch.setattr("roundpipe.cli.find_commands", lambda: {"fake": FakeCommand(act)})
    return main(["fake"])


def raises(error: BaseException) -> Callable[[], int]:
    def act() -> int:
        raise error

    return act


def test_every_module_in_commands_is_a_command() -> None:
    commands = find_commands()
    assert "finetune" in commands
    for command in commands.values():
        assert command.HELP
        assert command.__doc__
        assert callable(command.configure)
        assert callable(command.run)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())  # lines end where the terminal does
    for name, command in find_commands().items():
        assert name in printed
        assert command.HELP in printed


def test_a_commands_help_describes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["finetune", "--help"])
    printed = capsys.readouterr().out
    assert "Fine-tune a causal language model as a recipe says" in printed
    assert "--set KEY=VALUE" in printed


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"roundpipe {__version__}"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["finetune"]])
def test_arguments_that_cannot_be_read_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: roundpipe" in capsys.readouterr().err


def test_a_command_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_fake(monkeypatch, lambda: 0) == 0
    assert run_fake(monkeypatch, lambda: 7) == 7


def test_unusable_input_is_one_line_each_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(monkeypatch, raises(UsageError(["a: wrong", "b: wrong too"]))) == 2
    assert capsys.readouterr().err == "error: a: wrong\nerror: b: wrong too\n"


def test_a_failure_of_ours_is_one_line_with_its_notes_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TrainingError("the loss became nan")
    add_note(error, "layer 3")
    assert run_fake(monkeypatch, raises(error)) == 1
    assert capsys.readouterr().err == "error: the loss became nan\n  layer 3\n"


def test_an_unexpected_failure_shows_its_traceback_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(monkeypatch, raises(ZeroDivisionError("by zero"))) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("error: ZeroDivisionError: by zero\n")


def test_an_interruption_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(monkeypatch, raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"
    assert run_fake(monkeypatch, raises(CommandInterrupted("After step 3."))) == 130
    assert capsys.readouterr().err == "\nAfter step 3.\n"


def test_the_command_line_loads_nothing_that_torch_does_not() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import roundpipe.cli as cli; "
        "cli.find_commands(); loaded = {name.partition('.')[0] for name in set(sys.modules) - "
        "before}; print(sorted(loaded & {'transformers', 'pydantic', 'yaml', 'rich', "
        "'matplotlib', 'gguf', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roundpipe.cli", "--version"],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith("roundpipe ")
