"""Packed data: two models in a row are one model, and gradients flow back through both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import DevicePool, open_cpu_pool
from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import RoundPipePackedData
from support.subjects import SUBJECTS

PACKED = RoundPipeRunConfig(num_microbatch=3, merge_output=False)


def two_halves(pool: DevicePool, model: torch.nn.Sequential) -> tuple[RoundPipe, RoundPipe]:
    front = RoundPipe(model[:2], devices=pool, name="front")
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(3)], [range(2, 3), range(2)]))
    return front, RoundPipe(model[2:], devices=pool, name="back", model_run_config=config)


def test_two_chained_models_equal_one() -> None:
    subject = SUBJECTS["mlp"]
    (x,) = subject.batch(0).args
    whole, cut = subject.build(), subject.build()
    with open_cpu_pool(2) as pool:
        one = RoundPipe(whole, devices=pool, name="one")
        front, back = two_halves(pool, cut)
        want_x, got_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        want = one(want_x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        packed = front(got_x, roundpipe_run_config=PACKED)
        assert isinstance(packed, RoundPipePackedData)
        assert len(packed) == 3
        got = back(packed)
        assert torch.equal(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
        for pipe in (one, front, back):
            pipe.synchronize()
        assert want_x.grad is not None
        assert got_x.grad is not None
        assert torch.equal(got_x.grad, want_x.grad)
        for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)


def test_packed_data_wants_its_own_number_of_microbatches() -> None:
    subject = SUBJECTS["mlp"]
    (x,) = subject.batch(0).args
    with open_cpu_pool(1) as pool:
        front, back = two_halves(pool, subject.build())
        with torch.no_grad():
            packed = front(x, roundpipe_run_config=PACKED)
            assert back(packed).shape == (12, 3)
            with pytest.raises(InvalidValueError, match="3") as caught:
                back(packed, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
        assert "2" in str(caught.value)


def test_the_number_of_microbatches_is_that_of_the_packed_data() -> None:
    x, label = torch.randn(10, 4), torch.randn(10, 4)
    with open_cpu_pool(2) as pool:
        front, back = (RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices=pool) for _ in range(2))
        packed = front(
            x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=5, merge_output=False)
        )
        pieces: list[int] = []

        def loss_fn(out: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            pieces.append(len(part))
            return ((out - part) ** 2).sum()

        back.forward_backward((packed,), label=label, loss_fn=loss_fn)
        assert pieces == [2] * 5


class Dicts(nn.Module):
    """A dict with a tensor, a tensor without gradient, a 0-dim one and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"h": self.linear(x), "mask": x > 0, "loss": x.sum(), "n": 7}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, d: dict[str, Any], scale: torch.Tensor, names: list[str]) -> torch.Tensor:
        assert (d["n"], names) == (7, ["a", "b"])
        out: torch.Tensor = self.linear(d["h"]) * d["mask"] * scale + d["loss"]
        return out


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("frozen", ["", "front", "back", "both"])
def test_packed_data_are_mixed_with_other_arguments_and_gradients_find_their_way(
    frozen: str, num_microbatch: int
) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(Dicts()), nn.Sequential(Takes())]
    for model, name in zip(models, ("front", "back"), strict=True):
        model.requires_grad_(frozen not in (name, "both"))
    twins = copy.deepcopy(models)
    x, scale = torch.randn(7, 4), torch.randn(7, 4)
    got_x, want_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    got_scale, want_scale = scale.clone().requires_grad_(), scale.clone().requires_grad_()
    want = []
    for piece, part in zip(
        want_x.tensor_split(num_microbatch), want_scale.tensor_split(num_microbatch), strict=True
    ):
        want.append(twins[1][0](twins[0](piece), part, ["a", "b"]))
        want[-1].square().sum().backward()
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    packed_config = RoundPipeRunConfig(num_microbatch=num_microbatch, merge_output=False)
    with open_cpu_pool(2) as pool:
        front, back = (
            RoundPipe(model, devices=pool, model_run_config=config, name=name)
            for model, name in zip(models, ("front", "back"), strict=True)
        )
        packed = front(got_x, roundpipe_run_config=packed_config)
        assert list(packed) == ["h", "mask", "loss", "n"]
        assert list(packed["n"]) == [7] * num_microbatch
        for again in range(2):
            got_x.grad = got_scale.grad = None
            front.zero_grad()
            back.zero_grad()
            if again:  # the first round's data were looked at, these are not
                packed = front(got_x, roundpipe_run_config=packed_config)
            out = back(packed, got_scale, names=["a", "b"])
            assert torch.equal(out, torch.cat(want))
            for piece in out.tensor_split(num_microbatch):
                piece.square().sum().backward(retain_graph=True)
            front.synchronize()
            back.synchronize()
            for got, wanted in (
                (got_x, want_x), (got_scale, want_scale),
                *zip(models[0].parameters(), twins[0].parameters(), strict=True),
                *zip(models[1].parameters(), twins[1].parameters(), strict=True),
            ):  # fmt: skip
                assert (got.grad is None) == (wanted.grad is None)
                if got.grad is not None and wanted.grad is not None:
                    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-6, atol=1e-5)


def test_a_model_may_be_given_its_own_packed_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(6, 4)
    with RoundPipe(model, devices="cpu:2", model_run_config=PACKED) as pipe:
        with torch.no_grad():
            packed = pipe(x)
            for _ in range(3):
                packed = pipe(packed)
            want = list(x.tensor_split(3))
            for _ in range(4):
                want = [model(piece) for piece in want]
        assert all(torch.equal(a, b) for a, b in zip(packed, want, strict=True))
        x.requires_grad_()
        loss = torch.cat(list(pipe(pipe(x)))).sum()
        loss.backward()
        got, x.grad = x.grad, None
        sum(model(model(piece)).sum() for piece in x.tensor_split(3)).backward()
        assert got is not None
        assert x.grad is not None
        torch.testing.assert_close(got, x.grad)


def test_data_made_in_training_can_be_looked_at_without_gradients_and_used_with_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(6, 4)
    with RoundPipe(model, devices="cpu:2", model_run_config=PACKED) as pipe:
        for mode in (torch.no_grad, torch.inference_mode):
            packed = pipe(x)
            with mode():
                assert packed[0].requires_grad
            packed[1].sum().backward()
            pipe.synchronize()
            (bias,) = [p for p in model.parameters() if p.ndim == 1]
            assert bias.grad is not None
            assert bias.grad.tolist() == [2.0] * 4
            pipe.zero_grad()
        with torch.no_grad():
            packed = pipe(x)
        assert not packed[0].requires_grad


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5)


def test_the_callers_random_numbers_are_the_same_with_packed_data() -> None:
    """A layer that draws from the CPU's generator does so before the call returns."""

    def run(layer: nn.Module, merge_output: bool | None) -> tuple[torch.Tensor, torch.Tensor, bool]:
        config = RoundPipeRunConfig(num_microbatch=4, merge_output=merge_output)
        model = nn.Sequential(nn.Linear(64, 64), layer)
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
            torch.manual_seed(5)
            out = pipe(torch.ones(8, 64))
            in_flight = isinstance(out, RoundPipePackedData) and out.in_flight
            drawn = torch.rand(3)
            return torch.cat(list(out)) if merge_output is False else out, drawn, in_flight

    torch.manual_seed(0)
    for layer, stays in ((Draws(), False), (nn.Tanh(), True)):
        torch.manual_seed(1)
        merged, drawn, _ = run(layer, None)
        torch.manual_seed(1)
        packed, drawn_beside, in_flight = run(layer, False)
        assert in_flight == stays
        assert torch.equal(drawn, drawn_beside)
        assert torch.equal(merged, packed)


def test_packed_data_may_be_labels() -> None:
    torch.manual_seed(0)
    teacher, student = nn.Sequential(nn.Linear(4, 2)), nn.Sequential(nn.Linear(4, 2))
    x = torch.randn(7, 4)

    def loss_fn(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((out - label) ** 2).sum()

    with open_cpu_pool(2) as pool, RoundPipe(teacher, devices=pool) as taught:
        with RoundPipe(student, devices=pool) as learns:
            with torch.no_grad():
                label = taught(x, roundpipe_run_config=PACKED)
            got = learns.forward_backward(
                (x,), label=label, loss_fn=loss_fn, run_config=RoundPipeRunConfig(num_microbatch=3)
            )
    want = [loss_fn(student(piece), teacher(piece)) for piece in x.tensor_split(3)]
    assert torch.equal(got, (want[0] + want[1] + want[2]).detach())


def test_the_output_device_is_for_merged_outputs() -> None:
    config = RoundPipeRunConfig(num_microbatch=3, merge_output=False, output_device="meta")
    with RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices="cpu:2") as pipe, torch.no_grad():
        packed = pipe(torch.ones(6, 4), roundpipe_run_config=config)
        assert packed[0].device.type == "cpu"
