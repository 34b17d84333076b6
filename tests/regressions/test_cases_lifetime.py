"""Cases about errors, key names, copies and growth that went wrong in public."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from roundpipe import RoundPipe, RoundPipeRunConfig
from support.cases import config_of, split_plan, sum_loss
from support.faults import no_thread_left, notes_of

# A pipeline that failed told neither stage nor layer, hung, or left threads behind.


class Raising(nn.Linear):
    """Raises on one of its calls: the first forwards are 0..3, the recomputes 4..7."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = [0]
        self.raise_at = -1
        self.kind: type[Exception] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, self.calls[0] = self.calls[0], self.calls[0] + 1
        if number == self.raise_at:
            raise self.kind("boom")
        return super().forward(x)


def square(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", ["forward", "recompute", "loss", "merge"])
def test_a_layer_that_raises(place: str, kind: type[Exception]) -> None:
    torch.manual_seed(0)
    layer = Raising()
    layer.kind = kind
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), layer, nn.Linear(2, 2))
    x = torch.randn(8, 2)
    config = config_of(4, 4, 4)
    losses = [0]

    def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        losses[0] += 1
        if place == "loss" and losses[0] == 2:
            raise kind("boom")
        return square(output, label)

    def merge(outputs: list[Any]) -> Any:
        if place == "merge":
            raise kind("boom")
        return torch.cat(outputs)

    with no_thread_left():
        with RoundPipe(model, devices="cpu:2", model_run_config=config, name="net") as pipe:
            threads = threading.active_count()
            layer.raise_at = {"forward": 1, "recompute": 5}.get(place, -1)
            with pytest.raises(kind, match="boom") as caught:
                pipe.forward_backward(
                    (x,), label=x, loss_fn=loss_fn, return_outputs=True,
                    run_config=RoundPipeRunConfig(merge_output=merge),
                )  # fmt: skip
            note = notes_of(caught.value)[0]
            assert f"phase {place}" in note
            assert place == "merge" or "microbatch 1" in note
            assert ("layer 2 (Raising)" in note) == (place in ("forward", "recompute"))
            advised = any(
                "to lower what a device" in n for n in getattr(caught.value, "__notes__", [])
            )
            assert advised == (kind is torch.OutOfMemoryError and place != "merge")
            assert threading.active_count() == threads
            layer.raise_at = -1
            got = pipe.forward_backward((x,), label=x, loss_fn=square)
            pipe.synchronize()
    mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    want = [square(model(piece), piece) for piece in x.tensor_split(4)]
    for loss in want:
        loss.backward()
    assert got == want[0] + want[1] + want[2] + want[3]
    for gradient, parameter in zip(mine, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


# Prefixes of wrappers leaked into saved keys, so a checkpoint could not be loaded without them.


def build_named() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_key_names_are_those_of_the_plain_model() -> None:
    model = build_named()
    want = list(model.state_dict())
    parameters = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    with RoundPipe(model, devices="cpu:2") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        for _ in range(2):
            assert list(pipe.state_dict()) == want
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an optimizer must not be built on them
                assert [name for name, _ in pipe.named_parameters()] == parameters
            assert [name for name, _ in pipe.named_buffers()] == buffers
            assert [name for name, _ in pipe.optim_named_parameters()] == parameters
            pipe.forward_backward((torch.randn(6, 2),), loss_fn=sum_loss)
            pipe.step(optimizer.step, is_async=False)
        plain = build_named()
        plain.load_state_dict(pipe.state_dict(), strict=True)
        pipe.load_state_dict(plain.state_dict(), strict=True)


# Models that hold locks or threads could not be copied, which broke averaging.


def test_a_deepcopy_is_equal_and_independent() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(6, 2)

    def train(pipe: RoundPipe) -> None:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((x,), loss_fn=sum_loss)
        pipe.step(optimizer.step)
        pipe.synchronize()

    with no_thread_left():
        with RoundPipe(model, devices="cpu:2") as pipe:
            train(pipe)
            before = copy.deepcopy(model.state_dict())
            with copy.deepcopy(pipe) as twin:
                assert all(torch.equal(twin.state_dict()[key], before[key]) for key in before)
                train(twin)
                assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
                assert not torch.equal(twin.state_dict()["0.weight"], before["0.weight"])


def test_pickling_says_what_to_save_instead() -> None:
    with RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="cpu:2", name="net") as pipe:
        with pytest.raises(TypeError, match=r"net cannot be pickled.*Save model.state_dict\(\)"):
            pickle.dumps(pipe)


def test_averaging_works_on_the_wrapped_model() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer)
    with RoundPipe(model, devices="cpu:2") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        average = AveragedModel(model)
        for _ in range(2):
            pipe.forward_backward((torch.ones(6, 2),), loss_fn=sum_loss)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            pipe.synchronize()
            average.update_parameters(model)
        (averaged,) = (p for name, p in average.named_parameters() if name.endswith("0.weight"))
        assert not torch.equal(averaged, layer.weight)
        assert int(average.n_averaged) == 2


# What was stashed for recompute was not released, and memory grew with every step.


def live_tensors() -> int:
    gc.collect()
    # By type: some objects of torch warn when they are asked for their class.
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("kind", ["fused", "forward and backward", "evaluation"])
def test_sixty_calls_leave_nothing_behind(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))
    config = config_of(4, 2, 3)
    split = RoundPipeRunConfig(num_microbatch=3, execute_plan=split_plan(4, 2))
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=0.01)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def fused(x: torch.Tensor) -> Any:
            _, output = pipe.forward_backward((x,), loss_fn=sum_loss, return_outputs=True)
            pipe.step(step)
            return output

        def driven(x: torch.Tensor) -> Any:
            output = pipe(x, roundpipe_run_config=split)
            output.sum().backward()
            pipe.step(step)
            return output

        def evaluated(x: torch.Tensor) -> Any:
            with torch.no_grad():
                return pipe(x, roundpipe_run_config=split)

        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "fused": fused, "forward and backward": driven, "evaluation": evaluated,
        }  # fmt: skip
        counts: list[tuple[int, int]] = []
        for number in range(60):
            x = torch.randn(6, 4)
            output = calls[kind](x)
            dead = [weakref.ref(x), weakref.ref(output)]
            del x, output
            if number + 1 in (10, 60):
                # Behind an empty step the optimizer thread has let go of the last one's gradients.
                pipe.step(lambda: None, is_async=False)
                pipe.synchronize()
                pipe.zero_grad()
                counts.append((live_tensors(), threading.active_count()))
        assert counts[0] == counts[1]
        assert [reference() for reference in dead] == [None, None]
