"""Exit codes, and the exceptions that carry one."""

from __future__ import annotations

from collections.abc import Iterable

from roundpipe.errors import InvalidValueError, RoundPipeError

UNUSABLE_INPUT = 2
INTERRUPTED = 130


class UsageError(InvalidValueError):
    """Input that a command cannot use, such as a bad recipe: exit code 2.

    Attributes:
        problems: one line each; what was given, what was expected, what to do.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class TrainingError(RoundPipeError, RuntimeError):
    """The training cannot go on, through no fault of the program: exit code 1."""


class CommandInterrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence on what was done and what was not: exit code 130."""
