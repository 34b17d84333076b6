"""What layers cost as far as their sizes tell, and plans made from that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.costs import (
    estimated_costs,
    layer_bytes,
    machine_of,
    multiplied_bytes,
    plan_from_sizes,
)
from roundpipe.devices import CpuChecks, open_cpu_pool


def test_bytes_of_a_layer_count_shared_tensors_once_and_buffers_too() -> None:
    linear = nn.Linear(4, 4, bias=False)
    assert layer_bytes(linear) == 64
    assert layer_bytes(nn.ModuleList([linear, linear])) == 64
    assert layer_bytes(nn.BatchNorm1d(2)) == 4 * 2 * 4 + 8
    assert layer_bytes(nn.ReLU()) == 0


def test_an_embedding_is_only_read() -> None:
    assert multiplied_bytes(nn.Embedding(100, 4)) == 0
    layer = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4, bias=False))
    assert multiplied_bytes(layer) == 64


def test_larger_layers_cost_more_and_frozen_ones_have_no_gradient() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(64, 64), nn.ReLU()]
    layers[1].requires_grad_(False)
    costs = estimated_costs(layers, "net").layers
    assert costs[1].forward_ms > costs[0].forward_ms > costs[2].forward_ms > 0
    assert costs[1].gradient_bytes == 0
    assert costs[0].gradient_bytes == costs[0].weight_bytes == 288


def test_the_planner_is_told_the_devices_memory() -> None:
    with open_cpu_pool(2, CpuChecks(limit_bytes=12345)) as pool:
        machine = machine_of(pool.devices)
    assert [device.memory_bytes for device in machine.devices] == [12345, 12345]


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_default_plan_is_legal_and_uses_all_devices(run_type: str, num_devices: int) -> None:
    layers = [nn.Linear(16, 16) for _ in range(5)]
    with open_cpu_pool(num_devices) as pool:
        plan = plan_from_sizes(run_type, layers, pool.devices, num_devices + 1)
    plan.check_valid(5, run_type)
    stages = [*plan.fwd_plan, *(plan.bwd_plan if run_type == "fused" else [])]
    assert len(stages) >= num_devices


@pytest.mark.parametrize("run_type", ["train", "fused"])
def test_a_stage_takes_no_more_than_its_share_of_the_smallest_device(run_type: str) -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
    size = layer_bytes(layers[0])
    limit = 10 * size  # 60% for the model, half of that for a stage: 3 layers, or gradients too
    with open_cpu_pool(1, CpuChecks(limit_bytes=limit)) as pool:
        plan = plan_from_sizes(run_type, layers, pool.devices, 2)
    assert max(len(stage) for stage in [*plan.fwd_plan, *plan.bwd_plan]) <= 3
    assert max(len(stage) for stage in plan.bwd_plan) == 1
    assert torch.float32.itemsize * 64 * 64 == size
