"""Random legal plans, wide stages among them, against the plain loop.

In a wide stage each replica sums the gradients of its own microbatches, and the sums are added in
the order of the replicas: another order than the plain loop's, so gradients then agree to 1e-6.
Outputs, losses, buffers and gradients of the inputs have no such sums and stay bitwise equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_cpu_pool
from roundpipe.devices.cpu import CpuDevice
from support.matrix import GRAINS, STEPS, assert_equal, plain_on
from support.plain import Record, assert_same, train_plain, train_roundpipe
from support.subjects import DROPOUT, SUBJECTS

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda count: f"cpu-{count}")
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    with open_cpu_pool(request.param) as opened:
        yield opened


def cut(rng: random.Random, begin: int, end: int) -> list[range]:
    """Consecutive stages of random lengths."""
    choices = range(begin + 1, end)
    inner = sorted(rng.sample(choices, rng.randint(0, len(choices))))
    edges = [begin, *inner, end]
    return [range(a, b) for a, b in pairwise(edges)] if end > begin else []


def random_plan(rng: random.Random, num_layers: int, *, widest: int) -> ModelExecutePlan:
    """A legal plan of a fused call; with ``widest`` above 1, at least one stage is wide."""
    fused_start = rng.randrange(num_layers)
    forward = cut(rng, 0, fused_start)
    backward = [range(fused_start, num_layers), *cut(rng, 0, fused_start)[::-1]]
    replicas = [rng.randint(1, widest) for _ in (*forward, *backward)]
    if widest > 1:
        replicas[rng.randrange(len(replicas))] = rng.randint(2, widest)
    plan = ModelExecutePlan(forward, backward, replicas[: len(forward)], replicas[len(forward) :])
    plan.check_valid(num_layers, "fused")
    assert plan.is_wide == (widest > 1)
    return plan


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_narrow_plans_change_nothing(name: str, seed: int, pool: DevicePool) -> None:
    subject, rng = SUBJECTS[name], random.Random(f"{name} {seed} {len(pool.devices)}")
    num_microbatch, is_async = rng.choice((1, 2, 5, 6)), rng.random() < 0.5
    plan = random_plan(rng, len(subject.build()), widest=1)
    config = RoundPipeRunConfig(
        num_microbatch=num_microbatch, execute_plan=plan, recompute_grain=rng.choice(GRAINS)
    )
    got = train_roundpipe(subject, pool, config, is_async, STEPS)
    assert_equal(pool, got, plain_on(pool, subject, num_microbatch, is_async), subject.tolerance)


def without_sums(record: Record) -> Record:
    """What no sum over microbatches is in, of the first call: later ones use stepped weights."""
    buffers = {
        key: t for key, t in record.state.items() if "running_" in key or "num_batches" in key
    }
    return Record(record.losses[:1], record.outputs[:1], [{}], record.input_gradients[:1], buffers)


def sums(record: Record) -> Record:
    """The parameters' gradients of the first call."""
    return Record([torch.zeros(())], [[]], record.gradients[:1], [None], {})


def check_wide(got: Record, want: Record, tolerance: float = TOLERANCE) -> None:
    assert_same(without_sums(got), without_sums(want))
    assert_same(sums(got), sums(want), max(tolerance, TOLERANCE))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_wide_plans_change_only_the_order_in_which_gradients_are_summed(
    name: str, seed: int, pool: DevicePool
) -> None:
    subject, rng = SUBJECTS[name], random.Random(f"wide {name} {seed} {len(pool.devices)}")
    num_microbatch = rng.choice((2, 3, 5, 6))
    plan = random_plan(rng, len(subject.build()), widest=len(pool.devices) + 1)
    config = RoundPipeRunConfig(
        num_microbatch=num_microbatch, execute_plan=plan, recompute_grain=rng.choice(GRAINS)
    )
    device = pool.devices[0]
    assert isinstance(device, CpuDevice)
    want = train_plain(subject, num_microbatch, True, 1, device.intraop_threads)
    got = train_roundpipe(subject, pool, config, True, 1)
    check_wide(got, want, subject.tolerance)
    # The order of the sum is fixed: not even timing changes a bit.
    assert_same(train_roundpipe(subject, pool, config, True, 1), got)


@pytest.mark.parametrize("num_microbatch", [3, 4])
def test_random_numbers_do_not_depend_on_replicas(num_microbatch: int, pool: DevicePool) -> None:
    rng = random.Random(num_microbatch)
    plan = random_plan(rng, len(DROPOUT.build()), widest=len(pool.devices))
    torch.manual_seed(7)
    narrow = RoundPipeRunConfig(num_microbatch=num_microbatch)
    want = train_roundpipe(DROPOUT, pool, narrow, True, 1)
    torch.manual_seed(7)
    got = train_roundpipe(DROPOUT, pool, replace(narrow, execute_plan=plan), True, 1)
    check_wide(got, want)


class Counting(nn.Module):
    """Multiplies by how many microbatches it has seen, which it has no buffer for at first."""

    seen: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.ones(1) if self.seen is None else self.seen + 1
        out: torch.Tensor = self.linear(x) * self.seen
        return out


@pytest.mark.parametrize("run_type", ["fused", "forward"])
def test_what_a_microbatch_leaves_in_a_buffer_is_found_by_the_next(
    run_type: str, pool: DevicePool
) -> None:
    layers = [Counting(), Counting()]
    stages = {
        "fused": ModelExecutePlan([range(1)], [range(1, 2), range(1)], [2], [2, 2]),
        "forward": ModelExecutePlan([range(2)], [range(2)], [2], [2]),
    }
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=stages[run_type])
    with RoundPipe(nn.Sequential(*layers), devices=pool, model_run_config=config) as pipe:
        if run_type == "fused":
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
        else:
            pipe(torch.ones(4, 2)).sum().backward()
        pipe.synchronize()
    assert [layer.seen for layer in layers] == [torch.tensor([4.0])] * 2
    grad = layers[1].linear.bias.grad
    assert grad is not None
    assert grad.tolist() == [1.0 + 2 + 3 + 4] * 2  # the factors of the microbatches
