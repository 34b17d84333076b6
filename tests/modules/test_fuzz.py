"""Random models equal a plain loop, bitwise; and a difference is found, made small and shown."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import fuzz, zoo
from support.fuzz import Case, Pools, difference, draw_case, script, shrink

SHORT, LONG = 45, 2000


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as opened:
        yield opened


@pytest.mark.parametrize("begin", range(0, SHORT, 15))
def test_random_models_equal_a_plain_loop(begin: int, pools: Pools) -> None:
    for seed in range(begin, begin + 15):
        what = difference(draw_case(seed), pools)
        assert what is None, f"model {seed} (python benchmarks/fuzz.py --first {seed}): {what}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_models_equal_a_plain_loop(pools: Pools) -> None:
    failed = {seed: what for seed in range(LONG) if (what := difference(draw_case(seed), pools))}
    assert failed == {}


def test_cases_are_many_kinds_of_models() -> None:
    cases = [draw_case(seed) for seed in range(300)]
    kinds = {(str(spec["kind"]), str(spec.get("way"))) for c in cases for spec in c.layers}
    assert len(kinds) >= 45
    assert {spec["form"] for c in cases for spec in c.layers} == set(zoo.FORMS)
    assert {call for c in cases for call in c.calls} == {"fused", "driven", "eval", "no grad"}
    assert draw_case(7) == draw_case(7)


def _broken(case: Case, pools: Pools) -> str | None:
    """As if roundpipe could not do dropout behind an attention."""
    del pools
    kinds = [spec["kind"] for spec in case.layers]
    return "wrong" if "tanh" in kinds and "linear" in kinds else None


def test_a_failing_case_becomes_small(pools: Pools) -> None:
    case = next(c for c in map(draw_case, range(500)) if len(c.layers) > 4 and _broken(c, pools))
    small = shrink(case, lambda smaller: _broken(smaller, pools) is not None)
    assert sorted(str(spec["kind"]) for spec in small.layers) == ["linear", "tanh"]
    assert (small.devices, small.num_microbatch, small.calls) == (1, 1, small.calls[:1])
    assert (small.cuts_forward, small.cuts_backward) == ([], [])


def test_a_difference_is_seen(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1, [{"kind": "linear", "form": "tensor"}], (4,))
    assert difference(case, pools) is None
    real = fuzz.run_roundpipe

    def wrong(case: Case, pool: Any) -> fuzz.Outcome:
        outcome = real(case, pool)
        name = next(name for name in outcome.tensors if name.startswith("gradient"))
        outcome.tensors[name] = torch.zeros(4, 4)
        return outcome

    monkeypatch.setattr(fuzz, "run_roundpipe", wrong)
    assert str(difference(case, pools)).startswith("gradient of 0.operation.module.weight")


def test_the_printed_program_runs_by_itself(tmp_path: Path) -> None:
    case = dataclasses.replace(draw_case(3), checked=False)
    path = tmp_path / "difference.py"
    path.write_text(script(case, "for the test"))
    source = str(Path(fuzz.__file__).parents[2] / "src")
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "equal\n"), result.stderr
