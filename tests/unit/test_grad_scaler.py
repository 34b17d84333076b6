"""GradScaler: torch's numbers with synchronous steps, one round later with asynchronous ones."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.devices import CpuChecks
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError
from support.faults import watched_pool
from support.versions import Gate

INF, NAN = math.inf, math.nan
CONFIG = RoundPipeRunConfig(num_microbatch=2)
OPTIONS: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}


class Factor(nn.Module):
    """The gradient of its weight is what the label says, whatever the weight is."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, state: Any) -> Any:
        total = state if state.dim() == 2 else state.reshape(-1, 1)
        return torch.cat([total, self.weight.expand(total.shape[0], 1)], dim=1)


def build(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Factor(i) for i in range(layers)))


def weighted(output: Tensor, label: Tensor) -> Tensor:
    """The label's columns become the layers' gradients; its rows are equal."""
    return (output[:, 1:] * label).mean() * label.shape[1] / 2


class Script:
    """The gradients of one iteration after the other, and how a run with them went."""

    def __init__(self, gradients: Sequence[Sequence[float]], layers: int = 2) -> None:
        self.labels = [torch.tensor([row] * 4) for row in gradients]
        self.layers = layers
        self.scales: list[float] = []
        self.trackers: list[int] = []
        self.weights: list[list[float]] = []

    def note(self, scaler: Any, model: nn.Module) -> None:
        tracker = getattr(scaler, "get_growth_tracker", None) or scaler._get_growth_tracker
        self.scales.append(scaler.get_scale())
        self.trackers.append(tracker())
        self.weights.append([p.item() for p in model.parameters()])

    @property
    def outcome(self) -> Any:
        return self.scales, self.trackers, self.weights


def run_torch(script: Script, clip: bool = False, **options: Any) -> Script:
    model = build(script.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", **options)
    for label in script.labels:
        for piece in label.chunk(2):
            loss: Any = scaler.scale(weighted(model(torch.ones(2, 1)), piece))
            loss.backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        script.note(scaler, model)
    return script


def run_roundpipe(
    script: Script,
    clip: bool = False,
    is_async: bool = False,
    update_async: bool = True,
    optimizer_class: Any = torch.optim.SGD,
    devices: Any = "cpu:2",
    **options: Any,
) -> Script:
    model, scaler = build(script.layers), GradScaler(**options)
    with RoundPipe(model, devices=devices, model_run_config=CONFIG) as pipe:
        optimizer = optimizer_class(pipe.optim_parameters(), lr=0.1, momentum=0.5)

        def step() -> None:
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(list(pipe.parameters()), 0.5)
            scaler.step(optimizer)
            optimizer.zero_grad()

        for label in script.labels:
            pipe.forward_backward(
                (torch.ones(4, 1),), label=label,
                loss_fn=lambda out, label: scaler.scale(weighted(out, label)),
            )  # fmt: skip
            pipe.step(step, is_async=is_async)
            scaler.update(is_async=update_async)
            script.note(scaler, nn.ParameterList(pipe.optim_parameters()))
    return script


SCRIPTS: dict[str, list[list[float]]] = {
    "good": [[1, 1]] * 6,
    "inf, then good": [[INF, INF], [1, 2], [1, 2], [1, 2], [1, 2]],
    "inf in one layer": [[1, 1], [1, INF], [1, 1], [-INF, 1], [1, 1], [1, 1]],
    "nan": [[1, 1], [NAN, 1], [1, NAN], [1, 1], [1, 1], [1, 1], [1, 1]],
    "nothing but inf": [[INF, 1]] * 4,
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, optim.SGD])
@pytest.mark.parametrize("name", SCRIPTS)
def test_synchronous_steps_give_torchs_numbers(name: str, optimizer_class: Any, clip: bool) -> None:
    options = {**OPTIONS, "growth_factor": 1.7, "backoff_factor": 0.3}
    want = run_torch(Script(SCRIPTS[name]), clip, **options)
    got = run_roundpipe(Script(SCRIPTS[name]), clip, optimizer_class=optimizer_class, **options)
    assert got.outcome == want.outcome


@settings(max_examples=25, deadline=None)
@given(
    gradients=st.lists(st.lists(st.sampled_from([1.0, -2.0, INF, NAN]), min_size=2, max_size=2),
                       min_size=1, max_size=8),
    interval=st.integers(1, 3),
    growth=st.sampled_from([2.0, 1e30]),
)  # fmt: skip
def test_any_sequence_gives_torchs_numbers(
    gradients: list[list[float]], interval: int, growth: float
) -> None:
    options: dict[str, Any] = {
        "init_scale": 3.0,
        "growth_interval": interval,
        "growth_factor": growth,
    }
    want = run_torch(Script(gradients), **options)
    assert run_roundpipe(Script(gradients), **options).outcome == want.outcome


def test_waiting_for_each_step_makes_asynchronous_ones_exact_too() -> None:
    """The weights then follow torch's; what a call computes with is one step behind as ever."""
    script = SCRIPTS["inf in one layer"]
    want = run_torch(Script(script), **OPTIONS)
    with watched_pool(2, CpuChecks(delay_seed=4)) as pool:
        got = run_roundpipe(
            Script(script), is_async=True, update_async=False, devices=pool, **OPTIONS
        )
    assert (got.scales, got.trackers) == (want.scales, want.trackers)


@pytest.mark.parametrize("delay_seed", [None, 1, 2])
def test_with_asynchronous_steps_the_scale_reacts_one_round_later(delay_seed: int | None) -> None:
    script: list[list[float]] = [[1, 1], [1, INF], [1, 1], [1, 1], [1, 1], [1, 1], [1, 1]]
    with watched_pool(2, CpuChecks(delay_seed=delay_seed)) as pool:
        got = run_roundpipe(Script(script), is_async=True, devices=pool, **OPTIONS)
    # What update t takes in: nothing, then the steps 0, 1, 2, ...
    assert got.scales == [8, 8, 4, 4, 8, 8, 16]
    assert got.trackers == [0, 1, 0, 1, 0, 1, 0]


def test_a_step_unscales_with_its_calls_scale_although_the_caller_has_updated() -> None:
    model, scaler, gate = build(1), GradScaler(init_scale=8.0), Gate()
    with RoundPipe(model, devices="cpu:2", model_run_config=CONFIG) as pipe:
        (master,) = pipe.optim_parameters()
        optimizer = torch.optim.SGD([master], lr=1.0)
        scaled: list[float] = []

        def step() -> None:
            gate.stand()
            assert master.grad is not None
            scaled.append(master.grad.item())
            scaler.step(optimizer)
            optimizer.zero_grad()

        def call() -> None:
            pipe.forward_backward(
                (torch.ones(4, 1),), label=torch.ones(4, 1) * 2,
                loss_fn=lambda out, label: scaler.scale(weighted(out, label)),
            )  # fmt: skip

        call()
        pipe.step(step)
        gate.wait_reached()
        scaler.update(2.0)
        call()
        gate.open()
        pipe.step(step)
        scaler.update()
        pipe.synchronize()
    assert scaled == [16.0, 4.0]
    assert master.item() == 1 - 2 - 2


def test_skip_growth_and_resume() -> None:
    """Gradients inf, 1, 1, 1 from scale 8 with growth interval 2; saved after the second step."""
    got = run_roundpipe(Script([[INF], [1], [1], [1]], layers=1), **OPTIONS)
    assert got.scales == [4, 4, 8, 8]
    assert got.trackers == [0, 1, 0, 1]
    saved = GradScaler(**OPTIONS)
    run = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    (weight,) = run.param_groups[0]["params"]

    def iterate(scaler: GradScaler, gradient: float) -> None:
        weight.grad = scaler.scale(torch.tensor([gradient]))
        scaler.step(run)
        scaler.update()

    iterate(saved, INF)
    assert saved.last_step_skipped
    iterate(saved, 1.0)
    assert not saved.last_step_skipped
    resumed = GradScaler()
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    iterate(resumed, 1.0)
    assert (resumed.get_scale(), resumed.get_growth_tracker()) == (8.0, 0)
    assert weight.item() == pytest.approx(0.8)
    pickled = pickle.loads(pickle.dumps(resumed))
    assert pickled.state_dict() == resumed.state_dict()


def test_a_skipped_asynchronous_step_can_be_asked_for() -> None:
    model, scaler = build(1), GradScaler(**OPTIONS)
    with RoundPipe(model, devices="cpu:2", model_run_config=CONFIG) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def step() -> None:
            scaler.step(optimizer)
            if not scaler.last_step_skipped:
                scheduler.step()
            optimizer.zero_grad()

        skipped = []
        for gradient in (1.0, INF, 1.0):
            pipe.forward_backward(
                (torch.ones(4, 1),), label=torch.full((4, 1), gradient),
                loss_fn=lambda out, label: scaler.scale(weighted(out, label)),
            )  # fmt: skip
            pipe.step(step)
            scaler.update()
            pipe.synchronize()
            skipped.append(scaler.last_step_skipped)
    assert skipped == [False, True, False]
    assert scheduler.get_last_lr() == [0.025]
    assert not GradScaler().last_step_skipped


def test_states_move_between_torchs_scaler_and_this_one() -> None:
    ours, theirs = GradScaler(**OPTIONS), torch.amp.GradScaler("cpu", init_scale=2.0)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 8.0
    ours.load_state_dict(torch.amp.GradScaler("cpu", init_scale=32.0).state_dict())
    assert (ours.get_scale(), ours.get_growth_interval()) == (32.0, 2000)


def test_two_optimizers_only_the_one_with_an_infinity_is_skipped() -> None:
    model, scaler = build(2), GradScaler(**OPTIONS)
    with RoundPipe(model, devices="cpu:2", model_run_config=CONFIG) as pipe:
        optimizers = [optim.SGD([master], lr=1.0) for master in pipe.optim_parameters()]

        def step() -> None:
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()

        pipe.forward_backward(
            (torch.ones(4, 1),), label=torch.tensor([[INF, 1.0]] * 4),
            loss_fn=lambda out, label: scaler.scale(weighted(out, label)),
        )  # fmt: skip
        pipe.step(step, is_async=False)
        scaler.update()
    assert [p.item() for p in model.parameters()] == [1.0, 0.0]
    assert (scaler.get_scale(), scaler.last_step_skipped) == (4.0, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("unscales", [False, True])
def test_16_bit_gradients_of_float32_masters(unscales: bool, dtype: torch.dtype) -> None:
    """Read and unscaled in one pass, or made float32 by unscale_: nothing is rounded to 16 bits."""
    parameters = [torch.linspace(-1, 1, 9).requires_grad_() for _ in range(2)]
    gradient = (torch.linspace(1, 2, 9) * 1e-7).mul(1024.0).to(dtype)
    ours, theirs = optim.SGD(parameters[:1], lr=1.0), torch.optim.SGD(parameters[1:], lr=1.0)
    scaler = GradScaler(init_scale=1024.0)
    parameters[0].grad = gradient.clone()
    parameters[1].grad = gradient.float() / 1024
    if unscales:
        scaler.unscale_(ours)
        assert parameters[0].grad.dtype is torch.float32
        assert torch.equal(parameters[0].grad, parameters[1].grad)
    scaler.step(ours)
    theirs.step()
    assert torch.equal(parameters[0], parameters[1])
    parameters[0].grad = torch.full((9,), INF).to(dtype)
    scaler.update()
    scaler.step(ours)
    assert scaler.last_step_skipped
    assert torch.equal(parameters[0], parameters[1])


def test_gradients_that_are_sparse_complex_or_empty() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.full((2, 2), 2.0), (3, 2), check_invariants=True
    )
    wave, nothing = nn.Parameter(torch.ones(2) * 1j), nn.Parameter(torch.ones(0, 3))
    wave.grad, nothing.grad = torch.ones(2) * 2j, torch.ones(0, 3)
    optimizer = torch.optim.SGD([table, wave, nothing], lr=1.0)
    scaler = GradScaler(init_scale=2.0)
    scaler.step(optimizer)
    assert table.tolist() == [[1, 1], [-1, -1], [1, 1]]
    assert wave.tolist() == [0, 0]
    scaler.update()
    wave.grad = torch.tensor([1j * INF, 0])
    scaler.step(optimizer)
    assert scaler.last_step_skipped


def test_a_disabled_scaler_does_nothing() -> None:
    scaler = GradScaler(growth_factor=0.0, enabled=False)
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), INF)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = torch.ones(1)
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert weight.item() == -INF
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_scaling_keeps_the_structure_and_the_precision() -> None:
    scaler = GradScaler()
    half = torch.ones((), dtype=torch.float16)
    assert scaler.scale(half).item() == 65536.0  # not a float16, in which it would be inf
    pair, nested = scaler.scale((half, [half]))
    assert (pair.item(), nested[0].item()) == (65536.0, 65536.0)
    assert [s.item() for s in scaler.scale(iter([half]))] == [65536.0]
    with pytest.raises(InvalidTypeError, match="outputs is a int; give a tensor or an iterable"):
        scaler.scale(3)  # type: ignore[call-overload]


def test_unscale_without_a_step_and_the_next_round_works() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler(**OPTIONS)
    for gradient in (INF, 1.0):
        weight.grad = scaler.scale(torch.tensor([gradient]))
        scaler.unscale_(optimizer)
        if math.isfinite(gradient):
            scaler.step(optimizer)
        scaler.update()
    assert (weight.item(), scaler.get_scale()) == (0.0, 4.0)


def test_calls_in_the_wrong_order() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler()
    with pytest.raises(StateError, match="no inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(StateError, match=r"no inf checks were recorded prior to update\(\)"):
        scaler.update()
    scaler = GradScaler()
    weight.grad = torch.ones(1)
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(StateError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(StateError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(StateError, match="a closure cannot be used while GradScaler is enabled"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.update(torch.tensor([4.0]))
    assert scaler.get_scale() == 4.0


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(InvalidValueError, match=r"growth_factor is 1.0; expected more than 1"):
        GradScaler(growth_factor=1.0)
    with pytest.raises(InvalidValueError, match=r"backoff_factor is 1.0; expected less than 1"):
        GradScaler(backoff_factor=1.0)
    with pytest.raises(InvalidValueError, match="the source state dict is empty, possibly because"):
        GradScaler().load_state_dict({})
    with pytest.raises(InvalidValueError, match="new_scale has 2 elements, requires_grad=False"):
        GradScaler().update(torch.ones(2))
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    with pytest.raises(InvalidValueError, match="attempting to unscale float16 gradients"):
        GradScaler().unscale_(torch.optim.SGD([weight]))
    scaler = GradScaler()
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_interval(), scaler.get_growth_factor()) == (7, 2.0)
    assert scaler.get_backoff_factor() == 0.5


@pytest.mark.parametrize("is_async", [False, True])
def test_updating_inside_a_step_function(is_async: bool) -> None:
    """Harmless in a synchronous step; beside an asynchronous one a call may use the scale."""
    scaler = GradScaler(**OPTIONS)
    with RoundPipe(build(1), devices="cpu:2", model_run_config=CONFIG) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=0.1)

        def step() -> None:
            scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()

        def iterate() -> None:
            pipe.forward_backward(
                (torch.ones(4, 1),), label=torch.ones(4, 1),
                loss_fn=lambda out, label: scaler.scale(weighted(out, label)),
            )  # fmt: skip
            pipe.step(step, is_async=is_async)
            pipe.synchronize()

        if is_async:
            with pytest.raises(StateError, match=r"update\(\) was called in an asynchronous step"):
                iterate()
        else:
            for _ in range(4):
                iterate()
            assert scaler.get_scale() == 32.0
