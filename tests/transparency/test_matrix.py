"""Whatever the plan, the devices and the microbatches: the numbers are a plain loop's, bitwise.

The plain loop runs on a device of the same kind. A real accelerator is held to a tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from roundpipe import RoundPipeRunConfig
from roundpipe.devices import CpuChecks, DevicePool, open_cpu_pool
from support.backends import with_accelerator
from support.matrix import GRAINS, STEPS, assert_equal, opened, plain_on
from support.plain import Subject, plans, train_roundpipe
from support.subjects import DROPOUT, SUBJECTS

MICROBATCHES = (1, 2, 5, 6)
CPU_COUNTS = (1, 2, 3, 5)
NUM_PLANS = len(plans(5))
# The quick half: synchronous and asynchronous steps take turns.
ALTERNATING = [
    pytest.param(count, index % 2 == 1, id=f"{count}-{'async' if index % 2 else 'sync'}")
    for index, count in enumerate(MICROBATCHES)
]
# Pools with and without delays take turns: devices, seed of the delays.
LATE = [(1, 0), (2, None), (3, 0)]


# On a fake accelerator all of it takes many minutes; test_matrix_accelerator.py has a part.
POOLS = [
    *(pytest.param(("cpu", count), id=f"cpu-{count}") for count in CPU_COUNTS),
    *(
        pytest.param((kind, count), id=f"{kind}-{count}", marks=pytest.mark.slow)
        for kind in with_accelerator(accelerator="accelerator")
        for count in (1, 2, 4)
    ),
]


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    with opened(*request.param) as pool:
        yield pool


def check_plans(
    subject: Subject,
    pool: DevicePool,
    num_microbatch: int,
    is_async: bool,
    runs: Sequence[tuple[int, str]],
) -> None:
    """Training runs, each with a plan (its place in the list) and a grain."""
    steps = STEPS if is_async else STEPS - 1  # the third is the first that an update came late to
    want = plain_on(pool, subject, num_microbatch, is_async, steps)
    every_plan = list(plans(len(subject.build())).values())
    for place, grain in runs:
        config = RoundPipeRunConfig(
            num_microbatch=num_microbatch, execute_plan=every_plan[place], recompute_grain=grain
        )
        got = train_roundpipe(subject, pool, config, is_async, steps)
        assert_equal(pool, got, want, subject.tolerance)


def quick_runs(num_devices: int, num_microbatch: int) -> list[tuple[int, str]]:
    """Two of all (plan, grain)."""
    turn = MICROBATCHES.index(num_microbatch) // 2 + num_devices
    return [(turn % NUM_PLANS, GRAINS[0]), ((turn + 2) % NUM_PLANS, GRAINS[1])]


def test_in_the_quick_runs_every_plan_meets_both_grains_and_both_ways_to_step() -> None:
    for ways in (MICROBATCHES[::2], MICROBATCHES[1::2]):  # synchronous, asynchronous
        runs = {run for d in CPU_COUNTS for count in ways for run in quick_runs(d, count)}
        assert runs == set(itertools.product(range(NUM_PLANS), GRAINS))


@pytest.mark.parametrize(("num_microbatch", "is_async"), ALTERNATING)
@pytest.mark.parametrize("name", SUBJECTS)
def test_training_equals_the_plain_loop(
    name: str, pool: DevicePool, num_microbatch: int, is_async: bool
) -> None:
    runs = quick_runs(len(pool.devices), num_microbatch)  # the whole product is the next test
    check_plans(SUBJECTS[name], pool, num_microbatch, is_async, runs)


@pytest.mark.slow
@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_microbatch", MICROBATCHES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_whole_matrix(
    name: str, pool: DevicePool, num_microbatch: int, is_async: bool, grain: str
) -> None:
    runs = [(place, grain) for place in range(NUM_PLANS)]
    check_plans(SUBJECTS[name], pool, num_microbatch, is_async, runs)


@pytest.mark.parametrize("num_microbatch", MICROBATCHES)
def test_dropout_is_the_same_for_every_plan_and_number_of_devices(
    pool: DevicePool, num_microbatch: int
) -> None:
    torch.manual_seed(7)
    kind = "cpu" if pool.devices[0].torch_device.type == "cpu" else "accelerator"
    with opened(kind, 1) as single:
        config = RoundPipeRunConfig(num_microbatch=num_microbatch)
        want = train_roundpipe(DROPOUT, single, config, True, STEPS)
    assert not torch.equal(want.losses[0], want.losses[1])
    every_plan = list(plans(5).values())
    for place, grain in quick_runs(len(pool.devices), num_microbatch):
        torch.manual_seed(7)
        config = RoundPipeRunConfig(
            num_microbatch=num_microbatch, execute_plan=every_plan[place], recompute_grain=grain
        )
        assert_equal(pool, train_roundpipe(DROPOUT, pool, config, True, STEPS), want)


@pytest.mark.parametrize(("count", "seed"), LATE)
@pytest.mark.parametrize("name", SUBJECTS)
def test_late_copies_and_poisoned_memory_change_nothing(
    name: str, count: int, seed: int | None
) -> None:
    subject = SUBJECTS[name]
    checks = CpuChecks(delay_seed=seed, max_delay_s=0.001)
    # Each case takes another plan and grain.
    turn = count + list(SUBJECTS).index(name)
    config = RoundPipeRunConfig(
        num_microbatch=3,
        execute_plan=list(plans(5).values())[turn % NUM_PLANS],
        recompute_grain=GRAINS[turn % 2],
    )
    with open_cpu_pool(count, checks) as pool:
        want = plain_on(pool, subject, 3, True)
        got = train_roundpipe(subject, pool, config, True, STEPS)
        assert_equal(pool, got, want, subject.tolerance)
        assert pool.reports() == []
