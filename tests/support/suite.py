"""The whole test suite, in processes of its own: two at a time, or as many as there are cores.

    PYTHONPATH=tests python -m support.suite [--slow]

A process imports and collects only the files it runs, which on two cores saves more than workers
that share all tests would. Besides the ordinary tests it builds the fake accelerator, and runs on
it its own tests, the contract of the devices and the engine's tests on one and on four devices.
Where that cannot be built it is left out, and that is said; if `CI` is set, it is a failure.
`--slow` runs what takes long instead.
"""

import argparse
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .fakeacc.builder import build, missing_requirement

ROOT = Path(__file__).parents[2]
_DROPOUT = (
    "tests/transparency/test_matrix_accelerator.py"
    "::test_dropout_is_the_same_for_every_number_of_accelerators"
)


@dataclass(frozen=True)
class Run:
    """One pytest process.

    Attributes:
        title: what it is about.
        arguments: of pytest.
        num_accelerators: how many fake accelerators it sees; its own tests choose themselves.
        needs_build: whether it needs the fake accelerator.
        keeps_to_a_core: whether its threads share one core where there are few, which is faster:
            they wait for each other most of the time. Others are about what threads do at once.
    """

    title: str
    arguments: tuple[str, ...]
    num_accelerators: int | None = None
    needs_build: bool = False
    keeps_to_a_core: bool = True

    def command(self) -> list[str]:
        """The process."""
        on_it = () if self.num_accelerators is None else ("-p", "support.fakeacc.plugin")
        return [sys.executable, "-m", "pytest", *on_it, *self.arguments]

    def environment(self) -> dict[str, str]:
        """With the tests' packages on the path, and one thread for each operation."""
        path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        changed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if self.num_accelerators is not None:
            changed["FAKEACC_DEVICES"] = str(self.num_accelerators)
        return {**os.environ, **changed}


def _on_accelerators(title: str, count: int, *arguments: str) -> Run:
    return Run(title, arguments, count, needs_build=True, keeps_to_a_core=False)


# Few, as each imports torch and most import transformers; the longest first.
ORDINARY = (
    Run("HuggingFace models and commands", ("tests/hf", "tests/wrapping", "tests/cli")),
    Run("units", ("tests/unit",)),
    Run("failures and order", ("tests/failure", "tests/ordering"), keeps_to_a_core=False),
    Run("equality and devices", ("tests/transparency", "tests/devices", "tests/regressions")),
    Run("optimizers and modules", ("tests/optim", "tests/modules")),
)
ACCELERATED = (
    _on_accelerators(
        "faults, contract, waits and order on fake accelerators",
        4,
        "-k",
        "accelerator",
        "tests/failure",
        "tests/devices",
        "tests/ordering",
    ),
    _on_accelerators(
        "equality on 1, 2 and 4 fake accelerators", 4, "-k", "accelerator", "tests/transparency"
    ),
    Run("the fake accelerator itself", ("tests/fakeacc",), needs_build=True),
    _on_accelerators(
        "devices that share a fake accelerator",
        1,
        "-k",
        "accelerator and not left_out",
        "tests/devices",
        _DROPOUT,
    ),
)
SLOW_ORDINARY = (Run("all that takes long", ("-m", "slow", "tests")),)
SLOW_ACCELERATED = (
    _on_accelerators(
        "equality on 1, 2 and 4 fake accelerators",
        4,
        "-m",
        "slow",
        "-k",
        "accelerator and not whole_matrix",
        "tests/transparency",
    ),
    Run("the fake accelerator itself", ("-m", "slow", "tests/fakeacc"), needs_build=True),
)


class _Cores(threading.local):
    """The calling thread's share of the cores, which the processes that it starts inherit."""

    def __init__(self, every: set[int], shares: Iterator[int]) -> None:
        self._every = every
        self._own = {next(shares)}

    def give(self, only_the_own: bool) -> None:
        """What is started next may use the thread's own core, or all."""
        if self._every:
            os.sched_setaffinity(0, self._own if only_the_own else self._every)


class Suite:
    """Runs, and what came of them."""

    def __init__(self) -> None:
        every = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.width = max(2, len(every))
        self._cores = _Cores(every, itertools.cycle(sorted(every) or [0]))
        self._is_decided = threading.Event()
        self._is_built = False

    def build(self) -> None:
        """Build the fake accelerator, once, before processes would do it beside each other."""
        begin_s = time.monotonic()
        try:
            build()
            self._is_built = True
        finally:
            self._is_decided.set()
        _say(f"fake accelerator: built or found in {time.monotonic() - begin_s:.0f} s")

    def run(self, run: Run) -> bool:
        """Run it and print what it has said. Returns whether it passed."""
        if run.needs_build:
            self._is_decided.wait()
            if not self._is_built:
                return False
        begin_s = time.monotonic()
        self._cores.give(run.keeps_to_a_core)
        outcome = subprocess.run(
            run.command(),
            env=run.environment(),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        seconds = time.monotonic() - begin_s
        _say(f"{outcome.stdout}{run.title}: {_verdict(outcome)} in {seconds:.0f} s\n")
        return outcome.returncode == 0


def run_all(runs: Sequence[Run]) -> bool:
    """Run them, several at a time. Returns whether all passed."""
    suite = Suite()
    with ThreadPoolExecutor(max_workers=suite.width) as pool:
        # First, so that nothing that waits for it can take its place.
        built = pool.submit(suite.build) if any(run.needs_build for run in runs) else None
        passed = list(pool.map(suite.run, runs))
        if built is not None:
            built.result()
        return all(passed)


def _verdict(outcome: subprocess.CompletedProcess[str]) -> str:
    return "passed" if outcome.returncode == 0 else f"FAILED (exit code {outcome.returncode})"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Builds, runs, and says how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slow", action="store_true", help="what takes long instead")
    is_slow = parser.parse_args().slow
    runs: tuple[Run, ...] = SLOW_ORDINARY if is_slow else ORDINARY
    may_pass = True
    if (problem := missing_requirement()) is not None:
        _say(f"the tests on the fake accelerator are left out: {problem}")
        may_pass = not os.environ.get("CI")
    else:
        runs += SLOW_ACCELERATED if is_slow else ACCELERATED
    begin_s = time.monotonic()
    passed = run_all(runs) and may_pass
    _say(f"{'passed' if passed else 'FAILED'}: all of it took {time.monotonic() - begin_s:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
