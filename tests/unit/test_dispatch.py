"""Dealing stages to devices, and runs that cannot begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.calls import Phase
from roundpipe.dispatch import backward_stages, forward_stages, schedule
from support.faults import no_thread_left


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_closed_model_says_so_and_waits_for_nobody(devices: str) -> None:
    with no_thread_left():
        pipe = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices=devices)
        pipe.forward_backward((torch.ones(4, 2),), loss_fn=sum_loss)
        pipe.close()
        pipe.close()
        with pytest.raises(RuntimeError, match="the devices were closed; make a new RoundPipe"):
            pipe(torch.ones(4, 2))
        with pytest.raises(RuntimeError, match="the devices were closed; make a new RoundPipe"):
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=sum_loss)
        pipe.synchronize()


PLAN = ModelExecutePlan([range(2), range(2, 3)], [range(3, 5), range(2, 3), range(2)])


def test_a_fused_call_goes_forward_is_fused_and_goes_back() -> None:
    stages = forward_stages(PLAN, "fused", first_trainable=0)
    assert [(stage.phase, stage.layers) for stage in stages] == [
        (Phase.FORWARD, range(2)),
        (Phase.FORWARD, range(2, 3)),
        (Phase.FUSED, range(3, 5)),
        (Phase.BACKWARD, range(2, 3)),
        (Phase.BACKWARD, range(2)),
    ]


@pytest.mark.parametrize(
    ("first_trainable", "layers"),
    [
        (-1, [range(3, 5), range(2, 3), range(2)]),
        (1, [range(3, 5), range(2, 3), range(2)]),
        (2, [range(3, 5), range(2, 3)]),
        (3, [range(3, 5)]),
        (5, [range(3, 5)]),  # its forward has been run by nobody else
    ],
)
def test_backward_ends_with_the_first_stage_that_is_trained(
    first_trainable: int, layers: list[range]
) -> None:
    assert [stage.layers for stage in backward_stages(PLAN, first_trainable)] == layers


@given(
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    cursor=st.integers(0, 4),
    num_devices=st.integers(1, 5),
    num_microbatch=st.integers(1, 7),
)
def test_stages_are_dealt_round_robin_and_each_microbatch_visits_each_stage_once(
    replicas: list[int], cursor: int, num_devices: int, num_microbatch: int
) -> None:
    cursor %= num_devices
    ranges = [range(index, index + 1) for index in range(len(replicas))]
    plan = ModelExecutePlan(ranges, fwd_replicas=replicas)
    stages = forward_stages(plan, "infer", 0)
    tasks, after = schedule(stages, cursor, num_devices, num_microbatch)
    # In order of position and replica the tasks go from device to device, one after the other.
    assert [task.device for task in tasks] == [
        (cursor + number) % num_devices for number in range(len(tasks))
    ]
    assert after == (cursor + len(tasks)) % num_devices
    for position, wanted in enumerate(replicas):
        here = [task for task in tasks if task.position == position]
        assert len(here) == min(wanted, num_devices, num_microbatch)
        assert sorted(m for task in here for m in task.microbatches) == list(range(num_microbatch))
        following = {
            m: t.device for t in tasks if t.position == position + 1 for m in t.microbatches
        }
        for task in here:
            assert [task.next_device(m) for m in task.microbatches] == [
                following.get(m) for m in task.microbatches
            ]


def test_the_cursor_lives_on_between_calls() -> None:
    with RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="cpu:3") as pipe:
        used = []
        for _ in range(4):
            with torch.no_grad():
                pipe(torch.ones(4, 2))
            used.append(list(pipe._engine.log)[-1].device)
    assert used == ["cpu:0", "cpu:1", "cpu:2", "cpu:0"]
