"""Masters and optimizers in every situation a training script brings about."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim.cases import NAMES
from roundpipe import RoundPipe, RoundPipeRunConfig, optim
from roundpipe.errors import InvalidTypeError, StateError
from support.faults import InjectedError, watched_pool
from support.versions import Gate

ONE = RoundPipeRunConfig(num_microbatch=1)


def total(output: Tensor, _label: Any) -> Tensor:
    return (output.abs() if output.is_complex() else output).sum()


def ones(*sizes: int) -> nn.Sequential:
    """Bias-free linear layers full of ones."""
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def weights(model: nn.Module) -> list[float]:
    """The first element of every parameter."""
    return [parameter.flatten()[0].item() for parameter in model.parameters()]


def plain_step(pipe: RoundPipe, optimizer: torch.optim.Optimizer, is_async: bool = False) -> None:
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)


# --- writing into parameters --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "through the inner model", "through the pipe"])
def test_masters_follow_what_is_written_into_parameters(how: str) -> None:
    model = ones(1, 1).bfloat16()
    with RoundPipe(model, torch.float32, devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=1.0)

        def iterate(is_async: bool) -> None:
            pipe.forward_backward((torch.ones(3, 1).bfloat16(),), loss_fn=total)
            plain_step(pipe, optimizer, is_async)

        iterate(is_async=True)
        pipe.synchronize()
        assert weights(model) == [-2.0]
        if how == "in place":
            with torch.no_grad():
                next(model.parameters()).fill_(16.0)
        else:
            target = pipe if how == "through the pipe" else model
            target.load_state_dict({"0.weight": torch.tensor([[16.0]])})
        iterate(is_async=False)
        assert weights(model) == [13.0]
        iterate(is_async=True)
        pipe.synchronize()
        assert weights(model) == [10.0]


@pytest.mark.parametrize("then", ["step", "synchronize"])
def test_a_change_that_a_step_in_flight_would_overwrite_is_refused(then: str) -> None:
    model = ones(1, 1)
    with RoundPipe(model, devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=1.0)
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        plain_step(pipe, optimizer, is_async=True)
        with torch.no_grad():
            next(model.parameters()).fill_(16.0)
        with pytest.raises(StateError, match=r"0\.weight: changed in place while a newer value"):
            pipe.synchronize() if then == "synchronize" else plain_step(pipe, optimizer)
        pipe.synchronize()
        assert weights(model) == [-2.0]


@pytest.mark.parametrize("look", ["optim_parameters", "synchronize", "deepcopy"])
def test_masters_hold_what_was_written_whoever_looks_first(look: str) -> None:
    model = ones(2, 1).bfloat16()
    with RoundPipe(model, torch.float32, devices="cpu:1", model_run_config=ONE) as pipe:
        (master,) = pipe.optim_parameters()
        model.load_state_dict({"0.weight": torch.full((1, 2), 16.0)})
        if look == "deepcopy":
            with copy.deepcopy(pipe) as twin:
                optimizer = optim.SGD(twin.optim_parameters(), lr=0.0)
                twin.forward_backward((torch.ones(3, 2).bfloat16(),), loss_fn=total)
                plain_step(twin, optimizer)
                assert weights(twin.model) == [16.0]
        elif look == "synchronize":
            pipe.synchronize()
        else:
            assert [found is master for found in pipe.optim_parameters()] == [True]
        assert master.tolist() == [[16.0, 16.0]]


def test_masters_keep_their_precision_where_nothing_was_written() -> None:
    model = ones(1, 1).bfloat16()
    with RoundPipe(model, torch.float32, devices="cpu:1", model_run_config=ONE) as pipe:
        (master,) = pipe.optim_parameters()
        optimizer = optim.SGD([master], lr=2.0**-12)
        pipe.forward_backward((torch.ones(1, 1).bfloat16(),), loss_fn=total)
        pipe.step(optimizer)
        pipe.synchronize()
        pipe.synchronize()
        assert [m.item() for m in pipe.optim_parameters()] == [1 - 2.0**-12]
        assert weights(model) == [1.0]


def test_masters_in_the_making_do_not_follow() -> None:
    model = ones(1, 1)
    with RoundPipe(model, devices="cpu:1", model_run_config=ONE) as pipe:
        (master,) = pipe.optim_parameters()
        optimizer = optim.SGD([master], lr=1.0)
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        plain_step(pipe, optimizer, is_async=True)
        with torch.no_grad():
            next(model.parameters()).fill_(16.0)
        list(pipe.optim_parameters())
        with pytest.raises(StateError, match=r"0\.weight: changed in place"):
            pipe.synchronize()
        assert weights(model) == [master.item()] == [-2.0]


@pytest.mark.parametrize("then", ["step", "synchronize"])
@pytest.mark.parametrize("module", [optim, torch.optim])
def test_a_change_that_a_layers_turn_overwrites_is_told(module: Any, then: str) -> None:
    model = ones(1, 1, 1)
    with RoundPipe(model, devices="cpu:1", model_run_config=ONE) as pipe:
        optimizer = module.SGD(pipe.optim_parameters(), lr=1.0)
        written = threading.Event()
        name = "step_fused" if hasattr(optimizer, "step_fused") else "step"
        update = getattr(optimizer, name)

        def held(*args: Any, **kwargs: Any) -> None:
            assert written.wait(60)
            update(*args, **kwargs)

        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        setattr(optimizer, name, held)
        pipe.step(optimizer)
        with torch.no_grad():
            list(model.parameters())[1].fill_(16.0)  # while the turn of layer 0 is held up
        written.set()
        with pytest.raises(StateError, match=r"^1\.weight: changed in place while a newer value"):
            pipe.synchronize() if then == "synchronize" else pipe.step(optimizer)
        pipe.synchronize()
        assert weights(model) == [-2.0, -2.0]


def test_a_failed_step_is_told_before_the_change_it_overwrites() -> None:
    model = ones(1, 1)
    with RoundPipe(model, devices="cpu:1", model_run_config=ONE) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
        written = threading.Event()

        def fail() -> None:
            assert written.wait(60)
            raise InjectedError("no step")

        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        setattr(optimizer, "step", fail)  # noqa: B010 - a method, to mypy
        pipe.step(optimizer)
        with torch.no_grad():
            next(model.parameters()).fill_(16.0)
        written.set()
        with pytest.raises(InjectedError, match="no step"):
            pipe.synchronize()
        with pytest.raises(StateError, match=r"0\.weight: changed in place"):
            pipe.synchronize()
        pipe.synchronize()
        assert weights(model) == [1.0]


# --- parameters that come, go, and are of unusual kinds -----------------------------------------


def test_a_parameter_unfrozen_later_trains_once_the_optimizer_has_it() -> None:
    model = ones(1, 1, 1)
    model[0].requires_grad_(False)
    with RoundPipe(model, devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.Lion(pipe.optim_parameters(), lr=0.5)
        for step in range(3):
            if step == 1:
                model[0].requires_grad_(True)
                first = next(iter(pipe.optim_parameters()))
                optimizer.add_param_group({"params": [first], "lr": 0.25})
            pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
            plain_step(pipe, optimizer, is_async=True)
        pipe.synchronize()
        # Lion's steps are of one size: two of 0.25, and three of 0.5.
        assert weights(model) == [0.5, -0.5]


@pytest.mark.parametrize("make", [optim.AdamW, torch.optim.AdamW])
def test_parameters_without_elements(make: Any) -> None:
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.nothing = nn.Parameter(torch.empty(0, 4))

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + self.nothing.sum()

    for step in (plain_step, lambda pipe, optimizer: pipe.step(optimizer, max_norm=1.0)):
        with watched_pool(2) as pool, RoundPipe(nn.Sequential(Empty()), devices=pool) as pipe:
            optimizer = make(pipe.optim_parameters())
            for _ in range(2):
                pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
                step(pipe, optimizer)
            pipe.synchronize()
            assert pipe.model[0].nothing.shape == (0, 4)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.weight).pow(2).sum(-1)


@pytest.mark.parametrize("make", [optim.AdamW, torch.optim.AdamW])
def test_complex_parameters(make: Any) -> None:
    plain = nn.Sequential(Wave())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for is_by_layer in (False, True):
        model = nn.Sequential(Wave())
        plain.load_state_dict(model.state_dict())
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        with (
            watched_pool(2) as pool,
            RoundPipe(model, torch.float32, devices=pool, model_run_config=ONE) as pipe,
        ):
            optimizer = make(pipe.optim_parameters(), lr=0.1)
            for _ in range(3):
                pipe.forward_backward((torch.ones(1, 2),), loss_fn=total)
                pipe.step(optimizer) if is_by_layer else plain_step(pipe, optimizer)
                plain(torch.ones(1, 2)).sum().backward()
                reference.step()
                reference.zero_grad()
            pipe.synchronize()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


def embedding() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))


@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_sparse_gradients_equal_a_plain_loop(is_by_layer: bool, name: str) -> None:
    plain, model = embedding(), embedding()
    table = plain[0].weight if name == "SparseAdam" else None
    ids = torch.tensor([[0], [3], [3], [1]])

    def make(parameters: Any) -> torch.optim.Optimizer:
        chosen = list(parameters)[:1] if table is not None else list(parameters)
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(chosen, lr=0.1)
        return optimizer

    reference = make(plain.parameters())
    # Both runs do the same; torch's Adagrad warns of itself if nobody has decided.
    invariants = torch.sparse.check_sparse_tensor_invariants(True)
    with invariants, RoundPipe(model, devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = make(pipe.optim_parameters())
        for _ in range(2):
            pipe.forward_backward((ids,), loss_fn=total)
            pipe.forward_backward((ids,), loss_fn=total)
            pipe.step(optimizer) if is_by_layer else plain_step(pipe, optimizer)
            for _ in range(2):
                plain(ids).sum().backward()
            reference.step()
            plain.zero_grad()
            pipe.zero_grad()
            for master in pipe.optim_parameters():
                master.grad = None
        pipe.synchronize()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


def test_sparse_16_bit_gradients_of_float32_masters() -> None:
    ids = torch.tensor([[0], [3], [3], [1]])
    results = []
    for is_by_layer in (False, True):
        model = embedding().bfloat16()
        with RoundPipe(model, torch.float32, devices="cpu:2", model_run_config=ONE) as pipe:
            with torch.sparse.check_sparse_tensor_invariants(True):
                optimizer = optim.SGD(pipe.optim_parameters(), lr=0.1)
                for _ in range(2):
                    pipe.forward_backward((ids,), loss_fn=total)
                    pipe.step(optimizer) if is_by_layer else plain_step(pipe, optimizer)
                pipe.synchronize()
        results.append(copy.deepcopy(model.state_dict()))
    assert not torch.equal(results[0]["0.weight"], embedding().bfloat16().state_dict()["0.weight"])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_sparse_gradients_stay_on_devices_with_memory_of_their_own() -> None:
    with watched_pool(2) as pool, RoundPipe(embedding(), devices=pool) as pipe:
        with pytest.raises(
            InvalidTypeError, match=r"the gradient of 0\.weight is sparse, which on"
        ):
            pipe.forward_backward((torch.tensor([[0], [3], [3]]),), loss_fn=total)


# --- what a step function may do ----------------------------------------------------------------


def test_a_closure_that_runs_the_model_is_refused_with_the_reason() -> None:
    with RoundPipe(ones(1, 1), devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = torch.optim.LBFGS(pipe.optim_parameters())

        def closure() -> Tensor:
            loss: Tensor = pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
            return loss

        with pytest.raises(StateError, match="was called from its own step function, which it wo"):
            pipe.step(lambda: optimizer.step(closure), is_async=False)
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)


def test_an_average_of_the_weights_kept_in_the_step_function() -> None:
    with RoundPipe(ones(1, 1), devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=1.0)
        average = [p.detach().clone() for p in pipe.optim_parameters()]

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, master in zip(average, pipe.parameters(), strict=True):
                    mean.lerp_(master, 0.5)

        for _ in range(2):
            pipe.forward_backward((torch.ones(2, 1),), loss_fn=total)
            pipe.step(step)
        pipe.synchronize()
        # Both calls computed with weight 1 (the second is one step behind): 1, -1, -3.
        assert [mean.item() for mean in average] == [-1.5]


def test_several_models_with_steps_in_flight_at_once() -> None:
    gates, pipes, order = [Gate() for _ in range(3)], [], list[int]()
    for _ in gates:
        pipes.append(RoundPipe(ones(1, 1), devices="cpu:1", model_run_config=ONE))
    optimizers = [optim.SGD(pipe.optim_parameters(), lr=1.0) for pipe in pipes]
    for index, (pipe, gate) in enumerate(zip(pipes, gates, strict=True)):

        def step(index: int = index, gate: Gate = gate) -> None:
            gate.stand()
            optimizers[index].step()
            order.append(index)

        pipe.forward_backward((torch.ones(index + 1, 1),), loss_fn=total)
        pipe.step(step)
    for gate in gates:
        gate.wait_reached()
    for index in (2, 0, 1):
        gates[index].open()
        pipes[index].synchronize()
    assert order == [2, 0, 1]
    assert [weights(pipe.model) for pipe in pipes] == [[0.0], [-1.0], [-2.0]]
    for pipe in pipes:
        pipe.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_in_the_step_function(set_to_none: bool) -> None:
    model = ones(1, 1).bfloat16()
    with RoundPipe(model, torch.float32, devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=1.0)

        def step() -> None:
            optimizer.step()
            pipe.zero_grad(set_to_none)

        for _ in range(3):
            pipe.forward_backward((torch.ones(2, 1).bfloat16(),), loss_fn=total)
            pipe.step(step, is_async=False)
        assert weights(model) == [1 - 3 * 2]


# --- learning rates -----------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2], gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda n: 0.5),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 2
    ),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=5),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def run_with_scheduler(make: Callable[[Any], Any], how: str) -> tuple[float, float]:
    """The weight and the learning rate after four steps with gradients 1."""
    weight = nn.Parameter(torch.zeros(1, 1))
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    with RoundPipe(nn.Sequential(layer), devices="cpu:2", model_run_config=ONE) as pipe:
        params = [weight] if how == "plain" else list(pipe.optim_parameters())
        optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
        scheduler = make(optimizer)
        needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if needs_metric else []))

        for _ in range(4):
            if how == "plain":
                weight.grad = torch.ones(1, 1)
                step()
                continue
            pipe.forward_backward((torch.full((1, 1), 1.0),), loss_fn=total)
            if how == "by layer" and not needs_metric:
                pipe.step(optimizer, scheduler=scheduler)
            else:
                pipe.step(step, is_async=how == "async")
        pipe.synchronize()
        lr = float(optimizer.param_groups[0]["lr"])
    return (weight if how == "plain" else layer.weight).item(), lr


@pytest.mark.parametrize("how", ["async", "sync", "by layer"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_do_what_they_do_in_a_plain_loop(name: str, how: str) -> None:
    assert run_with_scheduler(SCHEDULERS[name], how) == run_with_scheduler(
        SCHEDULERS[name], "plain"
    )


def test_a_learning_rate_changed_when_no_step_is_in_flight_holds_for_the_next() -> None:
    """Beside a step in flight nobody may touch its groups: call synchronize() first."""
    with RoundPipe(ones(1, 1), devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = optim.SGD(pipe.optim_parameters(), lr=1.0)
        for lr in (1.0, 0.5):
            optimizer.param_groups[0]["lr"] = lr
            pipe.forward_backward((torch.ones(1, 1),), loss_fn=total)
            plain_step(pipe, optimizer, is_async=True)
            pipe.synchronize()
        assert weights(pipe.model) == [-0.5]


# --- saving -------------------------------------------------------------------------------------


def saved(state: Any) -> Any:
    """Through a file, as plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_moves_between_roundpipe_and_plain_pytorch(name: str) -> None:
    """Three steps here, three there, in both orders: the numbers of six in one place."""
    theirs = getattr(torch.optim, name, getattr(optim, name))
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 3, generator=generator) for _ in range(6)]

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def on_roundpipe(model: nn.Sequential, batches: Any, state: Any) -> Any:
        with RoundPipe(model, devices="cpu:2", model_run_config=ONE) as pipe:
            optimizer = getattr(optim, name)(pipe.optim_parameters(), lr=0.01)
            if state is not None:
                optimizer.load_state_dict(state)
            for x in batches:
                pipe.forward_backward((x,), loss_fn=total)
                plain_step(pipe, optimizer)
            return saved(optimizer.state_dict())

    def on_torch(model: nn.Sequential, batches: Any, state: Any) -> Any:
        optimizer = theirs(model.parameters(), lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        for x in batches:
            total(model(x), None).backward()
            optimizer.step()
            optimizer.zero_grad()
        return saved(optimizer.state_dict())

    results = []
    for first, second in ((on_torch, on_torch), (on_roundpipe, on_torch), (on_torch, on_roundpipe)):
        begun, ended = build(), build()
        state = first(begun, data[:3], None)
        ended.load_state_dict(saved(begun.state_dict()))
        state = second(ended, data[3:], state)
        results.append((ended.state_dict(), state["state"]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_an_optimizers_state_taken_while_its_step_runs_is_that_after_it() -> None:
    gate = Gate()
    with RoundPipe(ones(1, 1), devices="cpu:2", model_run_config=ONE) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0, momentum=0.5)
        step = optimizer.step

        def gated() -> None:
            gate.stand()
            step()

        setattr(optimizer, "step", gated)  # noqa: B010 - a method, to mypy
        pipe.forward_backward((torch.ones(3, 1),), loss_fn=total)
        pipe.step(optimizer)
        gate.wait_reached()
        gate.open()
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["momentum_buffer"].item() == 3.0
        pipe.step(optimizer)
        pipe.synchronize()
        assert len(optimizer._optimizer_state_dict_pre_hooks) == 1
