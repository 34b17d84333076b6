"""``roundpipe.verify``: planted faults are found and the layer is named; good models are equal."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.verification import Report
from support.subjects import SUBJECTS

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
seen_batches = 0


def square_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).sum()


def check(layer: nn.Module, loss_fn: Any = square_sum) -> Report:
    """A model with ``layer`` in the middle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), layer, nn.Linear(4, 4))
    return roundpipe.verify(model, X, torch.zeros(6, 4), loss_fn)


class CountsCalls(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class KeepsHistory(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(float(x.sum()))
        return super().forward(x)


class WritesGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global seen_batches  # noqa: PLW0603 - the fault
        seen_batches += 1
        return super().forward(x)


class RemembersInClass(nn.Linear):
    """Each call depends on the ones before it."""

    before = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + RemembersInClass.before
        RemembersInClass.before += 0.5
        return out


class OnTheHost(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.ones(4, device="cpu"))


class OnFirstGpu(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to("cuda:99"))


class NeverTheSame(nn.Linear):
    turn = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + next(self.turn) % 3)


class PythonNoise(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


def mean_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, label)


@pytest.mark.parametrize(
    ("layer", "kind", "words"),
    [
        (CountsCalls(4, 4), "attribute", "self.calls"),
        (KeepsHistory(4, 4), "attribute", "self.history"),
        (WritesGlobal(4, 4), "global", "the global seen_batches"),
        (RemembersInClass(4, 4), "global", "RemembersInClass.before"),
        (OnTheHost(4, 4), "device", "with its input on another device"),
        (OnFirstGpu(4, 4), "device", "make tensors with device=x.device"),
        (NeverTheSame(4, 4), "recompute", "keep what it decided with save_for_recompute"),
        (PythonNoise(4, 4), "random", "Python's random"),
        (nn.BatchNorm1d(4), "batch", "it computes statistics over rows"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_planted_fault_is_found_and_its_layer_named(
    layer: nn.Module, kind: str, words: str
) -> None:
    report = check(layer)
    assert not report.ok
    where = f"layer 2 ({type(layer).__name__})"
    assert kind in report.of(where)
    assert any(words in finding.text for finding in report.findings if finding.kind == kind)
    # Nobody else is accused, but layers behind one that changes what it returns.
    assert not [f for f in report.findings if f.layer.startswith(("layer 0", "layer 1"))]
    assert where in str(report)


def test_a_loss_that_is_a_mean_is_found() -> None:
    report = check(nn.Linear(4, 4), mean_loss)
    assert report.of("loss_fn") == ["loss"]
    assert 'it looks like a mean: give loss_reduction="mean"' in str(report)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    good = roundpipe.verify(model, X, torch.zeros(6, 4), mean_loss, loss_reduction="mean")
    assert good.ok, str(good)


class HandsOnAView(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        return h, h[:]


class DoublesInPlace(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        h, view = pair
        h.mul_(2)
        result: torch.Tensor = h + view
        return result


def test_a_difference_in_the_numbers_names_the_first_layer_that_shows_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), HandsOnAView(4, 4), DoublesInPlace())
    report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum)
    assert report.of("layer 2 (DoublesInPlace)") == ["difference"], str(report)


def test_what_fails_in_roundpipe_only_is_told_with_its_reason() -> None:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    report = roundpipe.verify(nn.Sequential(first, second), X, torch.zeros(6, 4), square_sum)
    assert [f.text for f in report.findings if f.kind == "error" and "is shared by" in f.text]


def test_a_layer_that_fails_anyway_is_named() -> None:
    report = check(nn.Linear(5, 5))
    assert report.of("layer 2 (Linear)") == ["plain"]
    assert report.compared == []


@pytest.mark.parametrize("name", ["mlp", "tied", "frozen", "nested"])
def test_good_models_are_equal(name: str) -> None:
    subject = SUBJECTS[name]
    batch = subject.batch(0)
    report = roundpipe.verify(
        subject.build(), batch.args, batch.label, subject.loss, input_kwargs=batch.kwargs
    )
    assert report.ok, str(report)
    assert len(report.compared) == 9


def test_a_tiny_llama_is_equal() -> None:
    tokens = torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(0))

    def loss(output: Any, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), label.flatten(), reduction="sum")

    report = roundpipe.verify(
        SUBJECTS["llama"].build(), (), tokens.roll(-1, 1), loss,
        input_kwargs={"input_ids": tokens}, num_microbatches=(2, 3),
    )  # fmt: skip
    assert report.ok, str(report)
    assert len(report.compared) == 6


def test_dropout_and_models_of_one_layer_are_equal() -> None:
    report = check(nn.Dropout(0.4))
    assert report.ok, str(report)
    report = roundpipe.verify(nn.Linear(4, 4), X, torch.zeros(6, 4), square_sum)
    assert report.ok, str(report)
    assert str(report).startswith("Equal: outputs, losses, gradients and buffers are those of")


def shared(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4), module, nn.Linear(4, 4), module)


@pytest.mark.parametrize(
    "module",
    [nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())],
    ids=lambda module: type(module).__name__,
)
def test_one_module_in_several_places_is_no_difference(module: nn.Module) -> None:
    report = roundpipe.verify(shared(module), X, torch.zeros(6, 4), square_sum)
    assert report.ok, str(report)
    assert len(report.compared) == 9


def test_a_module_that_is_a_layer_and_within_another_is_no_difference() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), act), act, nn.Linear(4, 4))
    report = roundpipe.verify(model, X, torch.zeros(6, 4), square_sum)
    assert report.ok, str(report)


def test_a_wrong_module_in_several_places_is_found_still() -> None:
    report = roundpipe.verify(shared(NeverTheSame(4, 4)), X, torch.zeros(6, 4), square_sum)
    assert "recompute" in report.of("layer 1 (NeverTheSame)")


def test_nothing_of_the_users_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), KeepsHistory(4, 4))
    model[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    state, python = torch.get_rng_state(), random.getstate()
    threads, grad = torch.get_num_threads(), X.grad
    roundpipe.verify(model, X, torch.zeros(6, 4), square_sum)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model[0].weight.grad.tolist() == [[1.0] * 4] * 4
    assert model[2].weight.grad is None
    assert model[2].history == []
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert torch.get_num_threads() == threads
    assert X.grad is grad


def test_a_layer_that_does_not_repeat_itself_is_not_said_to_depend_on_the_cut() -> None:
    assert "batch" not in check(NeverTheSame(4, 4)).of("layer 2 (NeverTheSame)")


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    with (
        roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices="cpu:1") as pipe,
        pytest.raises(InvalidTypeError, match="wrapped already; give the plain model"),
    ):
        roundpipe.verify(pipe, X)


class Output(dict[str, torch.Tensor]):
    """As a model of transformers returns it."""


class Returning(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(logits=super().forward(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Returning(4, 4), "returns a Output, which is no loss; give a loss_fn .*cut_model"),
        (nn.Linear(4, 4), r"returns a Tensor of shape \(6, 4\), which is no loss"),
    ],
)
def test_without_a_loss_function_the_model_must_return_a_loss(
    model: nn.Module, message: str
) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        roundpipe.verify(model, X)


def test_a_model_that_returns_its_loss_needs_no_loss_function() -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().sum()

    report = roundpipe.verify(Loss(4, 4), X, devices="cpu:1")
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("inputs", "more", "error", "message"),
    [
        ({"x": X}, {}, InvalidTypeError, r"inputs is a dict; give a tuple .* as \(x,\); keyword"),
        (3, {}, InvalidTypeError, "inputs is a int; give a tuple"),
        (X, {"input_kwargs": [X]}, InvalidTypeError, "input_kwargs is a list; give a dict"),
        (X, {"loss_fn": 3}, InvalidTypeError, r"loss_fn is a int; give a function of \(output"),
        (X, {"num_microbatches": (0,)}, InvalidValueError, r"num_microbatches is \(0,\)"),
        (X, {"num_microbatches": 2}, InvalidValueError, "num_microbatches is 2; give numbers"),
    ],
)
def test_arguments_that_cannot_be_used(
    inputs: Any, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        roundpipe.verify(nn.Linear(4, 4), inputs, torch.zeros(6, 4), **more)


def test_a_frozen_model_has_nothing_to_compare() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(InvalidValueError, match="nothing requires a gradient, neither"):
        roundpipe.verify(model, X, torch.zeros(6, 4), square_sum)
    given = X.clone().requires_grad_()
    assert roundpipe.verify(model, given, torch.zeros(6, 4), square_sum).ok


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model is a int; give an nn\.Module"):
        roundpipe.verify(3)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4))
    model.__dict__["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="the model cannot be copied"):
        roundpipe.verify(model, X)
