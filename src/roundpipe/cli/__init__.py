"""The command line: ``roundpipe COMMAND ...``. The only place that prints or exits.

Importing this module imports no command's dependencies; a command imports them when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from roundpipe import __version__
from roundpipe.cli.commands import find_commands
from roundpipe.cli.problems import INTERRUPTED, UNUSABLE_INPUT, CommandInterrupted, UsageError
from roundpipe.errors import RoundPipeError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code.

    Args:
        argv: the arguments after the program's name; the process's own when ``None``.

    Returns:
        0 when the command did its work, 1 when it failed, 2 for input it could not use (a bad
        recipe), 130 when it was interrupted.

    Raises:
        SystemExit: from argparse, for arguments it could not read (code 2) and for ``--help``.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal or a pipe that cannot show a character must not end a training run.
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        for problem in error.problems:
            _complain(problem)
        return UNUSABLE_INPUT
    except CommandInterrupted as interruption:
        print(f"\n{interruption}", file=sys.stderr)
        return INTERRUPTED
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads, such as head, has seen enough; Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RoundPipeError, OSError) as error:
        _complain(str(error), getattr(error, "__notes__", ()))
        return 1
    except Exception as error:  # noqa: BLE001 - the last stop; printed whole, with an exit code
        traceback.print_exc()
        _complain(f"{type(error).__name__}: {error}")
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roundpipe",
        description="Train PyTorch models larger than the memory of the GPUs at hand.",
    )
    parser.add_argument("--version", action="version", version=f"roundpipe {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in find_commands().items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _complain(message: str, notes: Sequence[str] = ()) -> None:
    print(f"error: {message}", file=sys.stderr)
    for note in notes:
        print(f"  {note}", file=sys.stderr)
