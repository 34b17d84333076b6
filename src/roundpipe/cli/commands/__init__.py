"""The subcommands, one module each; a new module here is a new subcommand.

A module's name is the command's name, its docstring the description that ``--help`` shows. It
imports what it needs inside ``run``, so that ``roundpipe --help`` stays quick.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Protocol, cast


class Command(Protocol):
    """What a command module offers."""

    HELP: str
    """One line for the list of commands."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to ``parser``."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work and give the exit code."""


def find_commands() -> dict[str, Command]:
    """Every command, by name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: cast("Command", importlib.import_module(f"{__name__}.{name}")) for name in names}
