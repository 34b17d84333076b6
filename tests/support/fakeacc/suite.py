"""Everything that runs on the fake accelerator, in processes of its own.

    PYTHONPATH=tests python -m support.fakeacc.suite [--slow]

builds it if need be, and runs its own tests, the contract of the devices and the engine's tests on
one and on four devices, two processes at a time. Where it cannot be built nothing runs, and that is
said; if `CI` is set, it is a failure. `--slow` runs the long ones instead.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .builder import build, missing_requirement

_ROOT = Path(__file__).parents[3]
_DROPOUT = (
    "tests/transparency/test_matrix_accelerator.py"
    "::test_dropout_is_the_same_for_every_number_of_accelerators"
)
_EQUALITY = ("tests/transparency",)
_BEHAVIOUR = ("tests/devices", "tests/ordering")


@dataclass(frozen=True)
class Run:
    """One pytest process.

    Attributes:
        title: what it is about.
        arguments: of pytest.
        num_devices: of the fake accelerator; None for its own tests, which choose themselves.
    """

    title: str
    arguments: tuple[str, ...]
    num_devices: int | None = None

    def command(self) -> list[str]:
        """The process."""
        on_it = () if self.num_devices is None else ("-p", "support.fakeacc.plugin")
        return [sys.executable, "-m", "pytest", *on_it, *self.arguments]

    def environment(self) -> dict[str, str]:
        """With this package on the path, and one thread for each stream's kernels."""
        path = os.pathsep.join([str(_ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        changed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if self.num_devices is not None:
            changed["FAKEACC_DEVICES"] = str(self.num_devices)
        return {**os.environ, **changed}


# The longest first: two run at a time.
RUNS = (
    Run("equality on 1, 2 and 4 devices", ("-k", "accelerator", *_EQUALITY), 4),
    Run("faults", ("-k", "accelerator", "tests/failure"), 4),
    Run("contract, waits and order", ("-k", "accelerator", *_BEHAVIOUR), 4),
    Run("the fake accelerator itself", ("tests/fakeacc",)),
    Run(
        "devices that share one accelerator",
        ("-k", "accelerator and not left_out", "tests/devices", _DROPOUT),
        1,
    ),
)
SLOW_RUNS = (
    Run(
        "equality on 1, 2 and 4 devices",
        ("-m", "slow", "-k", "accelerator and not whole_matrix", *_EQUALITY),
        4,
    ),
    Run("the fake accelerator itself", ("-m", "slow", "tests/fakeacc")),
)


def run_all(runs: Sequence[Run]) -> bool:
    """Runs them two at a time and prints what each has said. Returns whether all passed."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return all(list(pool.map(_run, runs)))


def _run(run: Run) -> bool:
    begin_s = time.monotonic()
    outcome = subprocess.run(
        run.command(),
        env=run.environment(),
        cwd=_ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    seconds = time.monotonic() - begin_s
    _say(f"{outcome.stdout}fake accelerator, {run.title}: {_verdict(outcome)} in {seconds:.0f} s")
    return outcome.returncode == 0


def _verdict(outcome: subprocess.CompletedProcess[str]) -> str:
    return "passed" if outcome.returncode == 0 else f"FAILED (exit code {outcome.returncode})"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Builds, runs, and says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slow", action="store_true", help="the long runs instead")
    runs = SLOW_RUNS if parser.parse_args().slow else RUNS
    if (problem := missing_requirement()) is not None:
        _say(f"the tests on the fake accelerator are left out: {problem}")
        return 1 if os.environ.get("CI") else 0
    begin_s = time.monotonic()
    build()  # once, before two processes would do it beside each other
    _say(f"fake accelerator: built or found in {time.monotonic() - begin_s:.0f} s")
    return 0 if run_all(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
