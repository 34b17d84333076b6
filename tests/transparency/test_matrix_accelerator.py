"""The matrix on an accelerator, real or fake, held against the plain loop on the same accelerator.

A part of it, in which each model meets every plan, both grains, synchronous and asynchronous steps
and each number of devices. On the fake accelerator equality is bitwise, half of the runs are late
at random, and the run's plugin fails a test that left out a wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from roundpipe import RoundPipeRunConfig
from support.backends import Accelerator
from support.matrix import GRAINS, STEPS, assert_equal, opened, plain_on
from support.plain import plans, train_roundpipe
from support.subjects import DROPOUT, SUBJECTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="no accelerator on this machine"
    ),
]

COUNTS = (1, 2, 4)
MICROBATCHES = (2, 3, 1, 5)


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    count: int
    is_async: bool
    plan: str
    grain: str
    num_microbatch: int

    def __str__(self) -> str:
        step = "async" if self.is_async else "sync"
        parts = (self.name, f"{self.count}d", step, self.plan, self.grain)
        return "-".join((*parts, f"{self.num_microbatch}m"))


def cases() -> Iterator[Case]:
    names = [name for name in SUBJECTS if name != "llama"]
    for shift, name in enumerate(names):
        turns = itertools.product(COUNTS, (True, False))
        for turn, (count, is_async) in enumerate(turns, start=shift):
            plan = list(plans(5))[turn % 5]
            grain = GRAINS[(turn + is_async) % 2]
            yield Case(name, count, is_async, plan, grain, MICROBATCHES[turn % 4])
    # Many small kernels, which take long on the fake accelerator.
    yield Case("llama", 1, False, "uneven", "stage", 2)
    yield Case("llama", 4, True, "one layer per stage", "layer", 2)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_an_accelerator_trains_as_its_plain_loop_does(case: Case) -> None:
    subject = SUBJECTS[case.name]
    torch.set_float32_matmul_precision("highest")
    config = RoundPipeRunConfig(
        num_microbatch=case.num_microbatch,
        execute_plan=plans(len(subject.build()))[case.plan],
        recompute_grain=case.grain,
    )
    with opened("accelerator", case.count) as pool:
        want = plain_on(pool, subject, case.num_microbatch, case.is_async)
        with Accelerator().late(case.count if case.is_async else None):
            got = train_roundpipe(subject, pool, config, case.is_async, STEPS)
        assert_equal(pool, got, want, subject.tolerance)


@pytest.mark.parametrize("count", COUNTS)
def test_dropout_is_the_same_for_every_number_of_accelerators(count: int) -> None:
    plan, other = list(plans(5).values())[2:4]
    torch.manual_seed(7)
    with opened("accelerator", 1) as single:
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
        want = train_roundpipe(DROPOUT, single, config, True, STEPS)
    torch.manual_seed(7)
    with opened("accelerator", count) as pool, Accelerator().late(count):
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=other, recompute_grain="layer")
        assert_equal(pool, train_roundpipe(DROPOUT, pool, config, True, STEPS), want)
