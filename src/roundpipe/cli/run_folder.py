"""The folder of results: there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from roundpipe.cli.problems import UsageError

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.jsonl"


class RunFolder:
    """A folder that is filled under a hidden name and appears under its own when complete.

    As a context: leaving it without :meth:`commit` removes what was written, and an earlier run
    under the same name stays as it was.

    Args:
        target: the folder that shall appear.
        overwrite: replace an earlier run there, as a whole.

    Raises:
        UsageError: ``target`` is there and may not be replaced.
    """

    def __init__(self, target: str | Path, overwrite: bool) -> None:
        self.target = Path(target).expanduser()
        self.path = self._sibling("unfinished")
        self._check(overwrite)

    def commit(self) -> None:
        """Let the folder appear under its name; an earlier run there is replaced."""
        if not self.target.exists():
            self.path.rename(self.target)
            return
        earlier = self._sibling("earlier")
        self.target.rename(earlier)
        try:
            self.path.rename(self.target)
        except BaseException:
            earlier.rename(self.target)
            raise
        shutil.rmtree(earlier)

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"output.folder: {self.path}: cannot be created: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)

    def _sibling(self, state: str) -> Path:
        # A sibling is on the same file system, where a rename is one step.
        return self.target.parent / f".{self.target.name}.{os.getpid()}.{state}"

    def _check(self, overwrite: bool) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise self._unusable("is a file")
        inside = {path.name for path in self.target.iterdir()}
        if not inside:
            return
        if not {RECIPE_FILE, METRICS_FILE} <= inside:
            raise self._unusable("is not empty, and not an earlier run")
        if not overwrite:
            raise self._unusable("holds an earlier run", "--set output.overwrite=true, or ")

    def _unusable(self, reason: str, way_out: str = "") -> UsageError:
        return UsageError(
            f"output.folder: {self.target} {reason}; {way_out}choose another folder "
            "(--set output.folder=...)"
        )
