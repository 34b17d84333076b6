"""To the rest of PyTorch these are torch's optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from optim.cases import PLAIN, Case, assert_close, copies, parameters, train
from roundpipe import optim
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.optim.lion import TorchLion
from roundpipe.optim.native import Kernels

SHAPES = [(7, 31), (), (130,)]
IN_TORCH = [case for case in PLAIN if case.name != "Lion"]


@pytest.mark.parametrize("case", IN_TORCH, ids=str)
def test_they_are_subclasses_with_torchs_groups(case: Case) -> None:
    params = parameters(SHAPES)
    ours, torchs = case.ours(params), case.reference(params)
    assert isinstance(ours, type(torchs))
    assert ours.param_groups == torchs.param_groups
    assert list(ours.param_groups[0]) == list(torchs.param_groups[0])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_run_moves_to_torch_and_back_through_a_safe_checkpoint(case: Case, backend: str) -> None:
    params = parameters(SHAPES)
    expected = copies(params)
    train(case.reference(expected), expected, steps=9)

    def saved_and_loaded(optimizer: torch.optim.Optimizer) -> Any:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    generator = torch.Generator().manual_seed(1)
    state = None
    for make in (case.ours, case.reference, case.ours):
        optimizer = make(params)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        state = saved_and_loaded(optimizer)
    assert_close(params, expected)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_state_dicts_have_torchs_form(case: Case, backend: str) -> None:
    params = parameters(SHAPES)
    expected = copies(params)
    ours, torchs = case.ours(params), case.reference(expected)
    train(ours, params, steps=2)
    train(torchs, expected, steps=2)
    one, other = ours.state_dict(), torchs.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys()
        for name, value in state.items():
            mine = one["state"][index][name]
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape), name
            torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)


def test_the_momentum_of_sgd_may_be_none_in_a_checkpoint(backend: str) -> None:
    params = parameters(SHAPES)
    optimizer = optim.SGD(params, momentum=0.9, dampening=0.5)
    state = optimizer.state_dict()
    state["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    optimizer.load_state_dict(state)
    train(optimizer, params, steps=1)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], _grad(params[0]))


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def test_schedulers_drive_them_and_a_tensor_lr_stays_the_same_object(backend: str) -> None:
    for lr in (1.0, torch.tensor(1.0)):
        param = torch.zeros(1, requires_grad=True)
        optimizer = optim.SGD([param], lr=lr)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        group = optimizer.param_groups[0]
        given = group["lr"]
        weights = []
        for _ in range(3):
            param.grad = torch.ones(1)
            optimizer.step()
            scheduler.step()
            weights.append(param.item())
        assert weights == [-1.0, -1.5, -1.75]
        assert group["lr"] == 0.125
        assert group["lr"] is given or isinstance(lr, float)


def test_a_fused_step_counts_as_a_step_for_schedulers_and_hooks(backend: str) -> None:
    """Otherwise the scheduler warns that it was stepped before the optimizer."""
    param = torch.zeros(1, requires_grad=True)
    optimizer = optim.SGD([param], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        optimizer.step_fused({param: optim.Binding(torch.ones(1).bfloat16())})
        scheduler.step()
    assert param.item() == -1.75
    assert calls == ["before", "after"] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lr_scheduler.ReduceLROnPlateau,
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    ],
)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_scheduler_can_be_built(case: Case, make: Any) -> None:
    more = {"momentum": 0.9} if case.name == "SGD" else {}
    if case.name in ("Adagrad", "Adadelta", "ASGD", "Rprop"):
        more["lr"] = 0.1
    optimizer = case.ours(parameters(SHAPES), **more)
    cycles_momentum = any(key in optimizer.defaults for key in ("betas", "momentum"))
    if cycles_momentum or not isinstance(make, type(lambda: 0)):
        assert make(optimizer).optimizer is optimizer


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_frozen_and_unused_parameters_neither_move_nor_hold_state(case: Case, backend: str) -> None:
    used, unused, frozen = params = parameters([(5,), (5,), (5,)])
    frozen.requires_grad_(False)
    before = copies(params)
    decay = {} if case.name == "Rprop" else {"weight_decay": 0.1}
    optimizer = case.ours(params, **decay)
    for _ in range(3):
        used.grad = torch.ones(5)
        optimizer.step()
    assert not torch.equal(used, before[0])
    assert torch.equal(unused, before[1])
    assert torch.equal(frozen, before[2])
    # SGD without momentum has no state at all; torch's Adagrad has everybody's from the start.
    expected = {"SGD": 0, "Adagrad": 3}.get(case.name, 1)
    assert len(optimizer.state) == expected


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_parameters_added_later_step_from_then_on(case: Case, backend: str) -> None:
    params = parameters([(5,), (6,)])
    expected = copies(params)
    optimizer = case.ours(params[:1])
    train(optimizer, params[:1], steps=2)
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    train(optimizer, params, steps=2, seed=3)

    first = case.reference(expected[:1])
    train(first, expected[:1], steps=2)
    second = case.reference([{"params": expected[1:], "lr": 0.5}])
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        for param in expected:
            param.grad = torch.randn(param.shape, generator=generator)
        first.step()
        second.step()
    assert_close(params, expected)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_copies_and_pickles_go_on_like_the_original(case: Case, backend: str) -> None:
    params = parameters(SHAPES)
    optimizer = case.ours(params)
    train(optimizer, params, steps=2)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = copied.param_groups[0]["params"]
        assert type(copied) is type(optimizer)
        train(copied, theirs, steps=2, seed=5)
        continued = copies(params)
        other = case.ours(continued)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(other, continued, steps=2, seed=5)
        for one, two in zip(theirs, continued, strict=True):
            assert torch.equal(one, two)
        assert not torch.equal(theirs[0], params[0])


def test_a_closure_gives_the_loss_with_gradients_enabled(backend: str) -> None:
    param = torch.tensor(2.0, requires_grad=True)
    optimizer = optim.SGD([param], lr=0.25)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param * param
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 4.0
    assert param.item() == 1.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_both_ways(set_to_none: bool, backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    optimizer = optim.SGD([param], lr=1.0)
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert param.tolist() == [-1.0] * 3


def test_a_backward_through_overwritten_values_fails(backend: str) -> None:
    param = torch.ones(3, requires_grad=True)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optim.SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_torchs_business(case: Case, dtype: torch.dtype, backend: str) -> None:
    params = [torch.randn(6, 3).to(dtype).requires_grad_() for _ in range(2)]
    params.append(torch.randn(5).requires_grad_())  # and one that the kernels take
    expected = copies(params)
    for optimizer, theirs in ((case.ours(params), params), (case.reference(expected), expected)):
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in theirs:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()
    # The default and the fused bfloat16 steps of torch differ by a rounding.
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert_close(params, expected, tolerance)
    assert params[0].dtype == dtype


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("grad_like_param", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.to(memory_format=torch.channels_last),
        lambda base: base.permute(2, 0, 1, 3),
        lambda base: torch.cat([base, base])[::2],
        lambda base: base[:, :, 1:3],
    ],
    ids=["channels_last", "permuted", "every_second_row", "middle_columns"],
)
def test_other_layouts(case: Case, view: Any, grad_like_param: bool, backend: str) -> None:
    base = torch.randn(4, 3, 5, 2)
    param = view(base.clone()).detach().requires_grad_()
    expected = param.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    neighbours = param.detach()
    optimizer, reference = case.ours([param]), case.reference([expected])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        grad = torch.randn(param.shape, generator=generator)
        expected.grad = grad.clone()
        param.grad = torch.empty_like(param).copy_(grad) if grad_like_param else grad
        optimizer.step()
        reference.step()
    assert param.data_ptr() == neighbours.data_ptr()
    assert_close([param], [expected])


def test_a_state_of_another_layout_is_laid_out_anew(backend: str) -> None:
    """A checkpoint of a contiguous model goes on in a channels_last one."""
    expected = parameters([(2, 3, 4, 5)])
    reference = optim.AdamW(expected)
    train(reference, expected, steps=2)
    params = [expected[0].detach().to(memory_format=torch.channels_last).requires_grad_()]
    optimizer = optim.AdamW(params)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(optimizer, params, steps=2, seed=5)
    train(reference, expected, steps=2, seed=5)
    assert_close(params, expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_sparse_gradients_work_or_are_refused_as_in_torch(case: Case, backend: str) -> None:
    results = []
    for make in (case.reference, case.ours):
        table = nn.Embedding(5, 2, sparse=True)
        nn.init.ones_(table.weight)
        optimizer = make(table.parameters())
        table(torch.tensor([1, 3, 3])).sum().backward()
        if case.name in ("SGD", "Adagrad"):
            optimizer.step()
            results.append(table.weight.detach())
        else:
            with pytest.raises((RuntimeError, InvalidTypeError), match="sparse gradient"):
                optimizer.step()
            assert torch.equal(table.weight, torch.ones(5, 2))
    assert len(results) in (0, 2)
    if results:
        assert_close(results[1:], results[:1])
        assert not torch.equal(results[0], torch.ones(5, 2))


def test_subclasses_of_tensors_are_left_to_torch(backend: str) -> None:
    class Marked(nn.Parameter):
        pass

    param = Marked(torch.ones(3))
    param.grad = torch.ones(3)
    optim.SGD([param], lr=1.0).step()
    assert param.tolist() == [0.0] * 3


def test_a_lazily_negated_gradient_is_negated(backend: str) -> None:
    param = torch.zeros(3, requires_grad=True)
    negated = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert negated.is_neg()
    param.grad = negated
    optim.SGD([param], lr=1.0).step()
    assert param.tolist() == [1.0] * 3


def test_differentiable_steps_are_torchs() -> None:
    param = torch.ones(3, requires_grad=True)
    lr = torch.tensor(0.5, requires_grad=True)
    moving = param.clone()
    moving.grad = torch.ones(3)
    optim.SGD([moving], lr=lr, differentiable=True).step()
    moving.sum().backward()
    assert lr.grad is not None
    assert lr.grad.item() == -3.0


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adamax", "ASGD"])
def test_capturable_is_refused_on_the_cpu_as_in_torch(name: str) -> None:
    params = parameters([(3,)])
    optimizer = Case(name).ours(params, capturable=True)
    params[0].grad = torch.ones(3)
    with pytest.raises(AssertionError, match="If capturable=True"):
        optimizer.step()


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_foreach_and_fused_are_accepted(option: str, backend: str) -> None:
    params = parameters(SHAPES)
    expected = copies(params)
    train(Case("AdamW", {option: True}).ours(params), params)
    train(torch.optim.AdamW(expected), expected)
    assert_close(params, expected)


def test_a_grad_scaler_drives_a_fused_optimizer_as_torchs(backend: str) -> None:
    """With fused=True the scaler leaves unscaling and skipping to the step."""
    results = []
    for cls in (optim.AdamW, torch.optim.AdamW):
        param = torch.ones(3, requires_grad=True)
        optimizer = cls([param], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for factor in (1.0, float("inf"), 2.0, 3.0):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([*param.tolist(), scaler.get_scale()])
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0][:3] != [1.0] * 3


def test_float64_processes_count_steps_in_float64(kernels: Kernels) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        param = torch.ones(3, dtype=torch.float32, requires_grad=True)
        optimizer = optim.AdamW([param])
        param.grad = torch.ones(3, dtype=torch.float32)
        optimizer.step()
        assert optimizer.state[param]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected a number that is at least 0"),
        ({"lr": torch.ones(2)}, "lr has 2 elements; expected a number or a tensor with one"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\); expected two numbers"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; expected a number"),
    ],
)
def test_lion_refuses_numbers_out_of_range(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValueError, match=text):
        optim.Lion(parameters([(2,)]), **arguments)


def test_torch_lion_takes_a_closure() -> None:
    param = torch.tensor(1.0, requires_grad=True)
    param.grad = torch.tensor(3.0)
    assert TorchLion([param], lr=0.5).step(lambda: 7.0) == 7.0
    assert param.item() == 0.5
