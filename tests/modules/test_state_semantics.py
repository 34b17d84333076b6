"""Buffers, attributes and other state of layers."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from support.cases import STAGES, config_of, split_plan, sum_loss

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def square_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


class Uncounted(nn.Module):
    """Batch norm without a counter: the kernel moves the statistics, and no version tells."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, training=self.training)


@pytest.mark.parametrize("mode", ["fused", "driven", "no grad", "eval"])
@pytest.mark.parametrize("stages", [1, 3])
def test_statistics_that_a_kernel_moves_unseen_move_once(stages: int, mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Uncounted(), nn.Linear(4, 4))
    plain = copy.deepcopy(model).train(mode != "eval")
    for piece in X.tensor_split(2):
        plain(piece)
    options = RoundPipeRunConfig(num_microbatch=2, execute_plan=split_plan(3, stages))
    with RoundPipe(model, devices="cpu:2", model_run_config=options) as pipe:
        pipe.train(mode != "eval")
        if mode == "fused":
            fused = config_of(3, stages, 2)
            pipe.forward_backward((X,), loss_fn=sum_loss, run_config=fused)
        elif mode == "driven":
            pipe(X).sum().backward()
        else:
            with torch.no_grad():
                pipe(X)
        pipe.synchronize()
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Reader(nn.Module):
    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.register_buffer("seen", norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.get_buffer("seen")


def test_a_buffer_that_one_layer_changes_and_another_reads_is_refused() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, Reader(norm))
    with RoundPipe(model, devices="cpu:2") as pipe:
        with pytest.raises(
            RuntimeError,
            match=r"buffer 'running_mean' of BatchNorm1d is shared by layers 0 and 1, and layer 0 "
            r"changes it, which the others would not see",
        ):
            pipe.forward_backward((X,), loss_fn=sum_loss)
        assert norm.running_mean is not None
        assert norm.running_mean.tolist() == [0.0] * 4
        pipe.eval()
        pipe.forward_backward((X,), loss_fn=sum_loss)  # nobody changes it
    model = nn.Sequential(norm, nn.Linear(4, 4), norm).train()
    with RoundPipe(model, devices="cpu:2") as pipe:
        with pytest.raises(RuntimeError, match="is shared by layers 0 and 2"):
            pipe.forward_backward((X,), loss_fn=sum_loss)


class Kinds(nn.Module):
    """Buffers of several dtypes in a 16-bit model."""

    scale: torch.Tensor
    steps: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("scale", torch.tensor(1.0 + 2**-20))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("frequencies", torch.arange(4.0) + 0.1, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.scale *= 1.0 + 2**-20
        assert self.frequencies.dtype == torch.float32
        out: torch.Tensor = self.linear(x) * self.scale.to(x.dtype)
        return out


@pytest.mark.parametrize("stages", [1, 2])
def test_buffers_of_other_dtypes_keep_dtype_and_value(stages: int) -> None:
    layer = Kinds()
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), layer, nn.Identity())
    want = (1.0 + torch.tensor(2.0**-20)) ** 3
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(3, stages, 2)) as pipe:
        pipe.forward_backward((X.to(torch.bfloat16),), loss_fn=sum_loss)
        pipe.synchronize()
        assert set(pipe.state_dict()) == set(model.state_dict())
    assert layer.steps.item() == 2**40 + 3
    assert layer.steps.dtype == torch.int64
    assert layer.scale.dtype == torch.float32
    torch.testing.assert_close(layer.scale, want, rtol=1e-6, atol=0)
    assert "1.frequencies" not in model.state_dict()
    assert torch.equal(layer.frequencies, torch.arange(4.0) + 0.1)


class Remembers(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.kind = "same"
        return super().forward(x)


def test_a_rebound_attribute_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = Remembers(4, 4)
    layer.kind = "same"
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with RoundPipe(model, devices="cpu:2") as pipe, caplog.at_level(logging.WARNING, "roundpipe"):
        for _ in range(2):
            pipe.forward_backward((X,), loss_fn=sum_loss)
    assert layer.calls == 0
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("layer 1 (Remembers) rebinds self.calls in its forward")
    assert "use a buffer (register_buffer)" in told[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.cell(x)[0]
        return out


def test_layers_that_only_use_their_attributes_are_not_accused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older weight norm says that it is older
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
    layers = [normed, nn.BatchNorm1d(4), nn.Dropout(0.1), Recurrent()]
    with RoundPipe(nn.Sequential(*layers), devices="cpu:2") as pipe:
        with caplog.at_level(logging.WARNING, "roundpipe"):
            pipe.forward_backward((X,), loss_fn=sum_loss)
    assert caplog.records == []
    model = nn.Sequential(nn.Linear(4, 4), Recurrent())
    report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum, num_microbatches=(1,))
    assert report.of("layer 1 (Recurrent)") in ([], ["batch"]), str(report)


def test_a_layer_that_looks_at_training_is_equal_in_both_modes() -> None:
    class Switches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.training else super().forward(x) * 2

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Switches(4, 4), nn.Linear(4, 4))
    for mode in (True, False):
        model.train(mode)
        report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum, num_microbatches=(2,))
        assert report.ok, str(report)


# --- the caller's context -------------------------------------------------------------------------


@pytest.mark.parametrize("stages", STAGES)
def test_default_dtype_default_device_and_deterministic_mode_are_the_callers(stages: int) -> None:
    seen: list[tuple[Any, ...]] = []

    class Makes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(1)
            deterministic = torch.are_deterministic_algorithms_enabled()
            seen.append((made.dtype, made.device.type, deterministic))
            return super().forward(x)

    model = nn.Sequential(*(Makes(4, 4) for _ in range(4)))
    with RoundPipe(model, devices="cpu:2", model_run_config=config_of(4, stages, 2)) as pipe:
        pipe.forward_backward((X,), loss_fn=sum_loss)
        assert set(seen) == {(torch.float32, "cpu", False)}
        seen.clear()
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        try:
            with torch.device("meta"):
                pipe.forward_backward((X,), loss_fn=sum_loss)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        assert set(seen) == {(torch.float64, "meta", True)}


def test_inference_mode_gives_inference_tensors_and_leaves_the_model_trainable() -> None:
    seen: list[bool] = []

    class Asks(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_inference_mode_enabled())
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Asks(4))
    plain = copy.deepcopy(model)
    with torch.inference_mode():
        want = torch.cat([plain(piece) for piece in X.tensor_split(3)])
    seen.clear()
    with RoundPipe(model, devices="cpu:2") as pipe:
        with torch.inference_mode():
            got = pipe(X)
        assert torch.equal(got, want)
        assert seen == [True] * 3
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)
        pipe.forward_backward((X,), loss_fn=sum_loss)
        pipe.synchronize()
    assert model[0].weight.grad is not None
