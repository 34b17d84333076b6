"""The user's class: attributes, parameters, state, copies, its end, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import open_cpu_pool
from support.faults import no_thread_left

X = torch.ones(4, 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def sum_loss(output: torch.Tensor, _label: Any) -> torch.Tensor:
    return output.sum()


def make(model: nn.Module | None = None, **options: Any) -> RoundPipe:
    return RoundPipe(model or net(), devices="cpu:2", name="net", **options)


# --- what is refused ------------------------------------------------------------------------------

ANY: Any = None
REFUSED_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: torch.relu, "model is a builtin_function_or_method; give an nn.Module"),
    "empty": (nn.Sequential, "the nn.Sequential has no layers; give it at least one"),
    "meta": (
        lambda: nn.Linear(1, 1, device="meta"),
        r"parameter 'weight' is on meta; weights live in host memory: call model.to\(\"cpu\"\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_cannot_be_run(name: str) -> None:
    build, text = REFUSED_MODELS[name]
    with no_thread_left(), pytest.raises((TypeError, ValueError), match=text):
        RoundPipe(build(), devices="cpu:2")


def test_options_that_cannot_be_used_leave_no_thread() -> None:
    with no_thread_left():
        with pytest.raises(ValueError, match="pin_model is 'yes'; choose one of 'alloc'"):
            make(pin_model="yes")
        with pytest.raises(
            TypeError, match="model_run_config is a dict; give a RoundPipeRunConfig"
        ):
            make(model_run_config={})
        with make() as pipe:
            with pytest.raises(TypeError, match="model is a RoundPipe already; wrap the plain"):
                make(pipe)


REFUSED_CALLS: dict[str, tuple[Callable[[RoundPipe], Any], str]] = {
    "tensor for arguments": (
        lambda pipe: pipe.forward_backward(X),  # type: ignore[arg-type]
        r"input_args is a Tensor; give a tuple of positional arguments, as \(x,\)",
    ),
    "no mapping": (
        lambda pipe: pipe.forward_backward((X,), [1]),  # type: ignore[arg-type]
        "input_kwargs is a list; give a dict of keyword arguments",
    ),
    "no loss function": (
        lambda pipe: pipe.forward_backward((X,), loss_fn="mse"),  # type: ignore[arg-type]
        r"loss_fn is a str; give a function of \(output, label\)",
    ),
    "no step function": (
        lambda pipe: pipe.step(None),  # type: ignore[arg-type]
        "step_fn is a NoneType; give a function that steps the optimizer",
    ),
    "original": (
        lambda pipe: pipe.set_original_model(ANY),
        "the original model is a NoneType, no nn.Module",
    ),
    "assign": (
        lambda pipe: pipe.load_state_dict(pipe.state_dict(), assign=True),
        r"load_state_dict\(assign=True\) would replace the parameters",
    ),
    "half": (
        lambda pipe: pipe.half(),
        "net: the parameters of a RoundPipe stay where they are, in host memory, and keep their",
    ),
    "pickle": (pickle.dumps, "net cannot be pickled: it owns threads. Save model.state_dict"),
    "no rows": (
        lambda pipe: pipe.forward_backward(
            (torch.tensor(1.0),), run_config=RoundPipeRunConfig(loss_reduction="mean")
        ),
        'loss_reduction="mean" needs to know how many rows each microbatch has',
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_calls_that_have_no_meaning(name: str) -> None:
    call, text = REFUSED_CALLS[name]
    with make() as pipe:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            call(pipe)
        assert pipe.forward_backward((X,), loss_fn=sum_loss).dim() == 0  # and it lives on


def test_training_without_gradients_is_refused() -> None:
    with make() as pipe:
        with pytest.raises(RuntimeError, match="called with gradients disabled"), torch.no_grad():
            pipe.forward_backward((X,), loss_fn=sum_loss)
        off = RoundPipeRunConfig(requires_grad=False)
        with pytest.raises(RuntimeError, match="called with gradients disabled"):
            pipe.forward_backward((X,), loss_fn=sum_loss, run_config=off)
        pipe.requires_grad_(False)
        with pytest.raises(RuntimeError, match="nothing in net requires grad: all parameters are"):
            pipe.forward_backward((X,), loss_fn=sum_loss)


def test_a_loss_function_that_returns_another_number_of_losses_is_refused() -> None:
    counts = iter([1, 2])

    def loss(output: torch.Tensor, _label: Any) -> list[torch.Tensor]:
        return [output.sum()] * next(counts)

    with make(model_run_config=RoundPipeRunConfig(num_microbatch=2)) as pipe:
        with pytest.raises(
            ValueError, match="loss_fn returned 1 losses for microbatch 0 and 2 for microbatch 1"
        ):
            pipe.forward_backward((X,), loss_fn=loss)


def test_a_backward_after_the_parameters_moved_on_is_refused() -> None:
    with make() as pipe:
        loss = pipe(X).sum()
        pipe.step(lambda: None, is_async=False)
        with pytest.raises(RuntimeError, match="stepped or synchronized between forward and"):
            loss.backward()


# --- attributes -----------------------------------------------------------------------------------


def test_attributes_are_those_of_the_model() -> None:
    model = net()
    model.vocabulary = 7  # type: ignore[assignment]
    with make(model) as pipe:
        assert pipe.vocabulary == 7
        pipe.vocabulary = 8
        assert model.vocabulary == 8
        del pipe.vocabulary
        assert not hasattr(model, "vocabulary")
        with pytest.raises(AttributeError, match="vocabulary"):
            _ = pipe.vocabulary
        assert pipe.model is model
        pipe.name = "other"
        assert not hasattr(model, "name")
        assert "append" in dir(pipe)
        assert repr(pipe) == "RoundPipe('other', 2 layers of Sequential, on cpu:0, cpu:1)"


def test_attributes_and_key_names_are_those_of_the_original_model() -> None:
    class Original(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.body, self.config = layers, {"size": 2}

    model = net()
    original = Original(model)
    with make(model) as pipe:
        pipe.set_original_model(original)
        assert pipe.config == {"size": 2}
        assert list(pipe.state_dict()) == list(original.state_dict())
        assert next(pipe.optim_named_parameters())[0] == "body.0.weight"
        pipe.eval()
        assert not original.training
        assert not model[0].training
        pipe.train()
        assert model[0].training
        Original(net()).load_state_dict(pipe.state_dict())


def test_a_half_made_object_has_no_attributes_and_does_not_recurse() -> None:
    with pytest.raises(AttributeError, match="'RoundPipe' object has no attribute 'weight'"):
        _ = RoundPipe.__new__(RoundPipe).weight


def test_the_name_is_where_it_was_made() -> None:
    with RoundPipe(net(), devices="cpu:1") as pipe:
        assert pipe.name.startswith("test_pipeline.py:")


# --- parameters -----------------------------------------------------------------------------------


def test_parameters_warn_once_and_are_the_models_own() -> None:
    with make() as pipe:
        with pytest.warns(
            UserWarning, match=r"parameters\(\) of net gives the model's own"
        ) as seen:
            first = list(pipe.parameters())
        assert len(seen) == 1
        assert all(a is b for a, b in zip(first, pipe.model.parameters(), strict=True))
        assert next(pipe.named_parameters())[0] == "0.weight"


def test_masters_are_given_within_the_context_and_to_its_thread_only() -> None:
    with make(optim_dtype=torch.float64) as pipe:
        with OptimizerCtx(), OptimizerCtx():
            masters = list(pipe.parameters())
        assert [m.dtype for m in masters] == [torch.float64] * 4
        assert all(a is b for a, b in zip(masters, pipe.optim_parameters(), strict=True))
        inside: list[nn.Parameter] = []
        pipe.step(lambda: inside.extend(pipe.parameters()), is_async=False)
        assert all(a is b for a, b in zip(masters, inside, strict=True))
        with pytest.warns(UserWarning, match="gives the model's own"):
            assert next(pipe.parameters()).dtype == torch.float32


def test_frozen_parameters_have_no_master_unless_they_had_one() -> None:
    model = net()
    model[0].requires_grad_(False)
    with make(model) as pipe:
        assert [n for n, _ in pipe.optim_named_parameters("m")] == ["m.1.weight", "m.1.bias"]
        model[1].requires_grad_(False)
        assert len(list(pipe.optim_parameters())) == 2


def test_a_parameter_outside_all_layers_is_refused_as_a_master() -> None:
    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stray = nn.Parameter(torch.ones(1))

    with make() as pipe:
        pipe.set_original_model(Original())
        with pytest.raises(RuntimeError, match="belongs to none of its layers, so it cannot be"):
            list(pipe.optim_parameters())


def test_zero_grad_drops_what_was_accumulated_and_within_a_step_the_masters() -> None:
    grads: list[Any] = []

    def step() -> None:
        grads.append([p.grad is None for p in pipe.parameters()])
        pipe.zero_grad()
        grads.append([p.grad is None for p in pipe.parameters()])

    with make() as pipe:
        pipe.forward_backward((X,), loss_fn=sum_loss)
        pipe.zero_grad()
        pipe.step(lambda: grads.append([p.grad for p in pipe.parameters()]), is_async=False)
        pipe.forward_backward((X,), loss_fn=sum_loss)
        pipe.step(step, is_async=False)
    assert grads == [[None] * 4, [False] * 4, [True] * 4]


# --- state and copies -----------------------------------------------------------------------------


def grow(pipe: RoundPipe) -> None:
    with torch.no_grad():
        for master in pipe.parameters():
            master.add_(1.0)


def test_state_dict_before_a_step_is_published_warns() -> None:
    with make() as pipe:
        pipe.step(grow, True, pipe)
        with pytest.warns(
            UserWarning, match=r"state_dict\(\) of net while a step is not published"
        ):
            pipe.state_dict()
        pipe.synchronize()
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_leaving_the_block_publishes_the_last_step() -> None:
    with make() as pipe:
        pipe.step(grow, True, pipe)
        before = pipe.model[0].weight.clone()
    assert torch.equal(pipe.model[0].weight, before + 1)


def test_leaving_the_block_raises_what_the_last_step_raised_and_ends_the_threads() -> None:
    def fail() -> None:
        raise KeyError("in the step")

    threads = set(threading.enumerate())
    with pytest.raises(KeyError, match="in the step"):
        with make() as pipe:
            pipe.step(fail)
    assert set(threading.enumerate()) == threads


def test_an_error_in_the_block_is_not_replaced_by_that_of_a_step() -> None:
    def fail() -> None:
        raise KeyError("in the step")

    def train() -> None:
        with make() as pipe:
            pipe.step(fail)
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        train()


def test_loading_a_state_refreshes_the_masters() -> None:
    plain = net()
    with make() as pipe:
        pipe.step(grow, False, pipe)
        pipe.load_state_dict(plain.state_dict())
        for master, want in zip(pipe.optim_parameters(), plain.parameters(), strict=True):
            assert torch.equal(master, want)
        pipe.step(grow, False, pipe)
        assert torch.equal(pipe.model.state_dict()["0.weight"], plain.state_dict()["0.weight"] + 1)


def test_a_deep_copy_has_the_same_weights_and_masters_and_its_own_threads() -> None:
    with no_thread_left(), make(optim_dtype=torch.float64) as pipe:
        pipe.step(grow, True, pipe)
        with copy.deepcopy(pipe) as twin:
            pairs = zip(twin.optim_parameters(), pipe.optim_parameters(), strict=True)
            for mine, theirs in pairs:
                assert mine is not theirs
                assert mine.dtype == torch.float64
                assert torch.equal(mine, theirs)
            assert twin.name == "net"
            before = pipe.model[0].weight.clone()
            twin.step(grow, False, twin)
            assert torch.equal(pipe.model[0].weight, before)
            assert torch.equal(twin.model[0].weight, before + 1)


# --- the end --------------------------------------------------------------------------------------


def test_close_and_with_and_garbage_collection_end_all_threads() -> None:
    for end in ("close", "with", "forgotten"):
        with no_thread_left():
            pipe = make()
            gone = weakref.ref(pipe)
            pipe.forward_backward((X,), loss_fn=sum_loss)
            pipe.step(grow, False, pipe)
            if end == "close":
                pipe.close()
                pipe.close()
            elif end == "with":
                with pipe:
                    pass
            del pipe
            gc.collect()
            assert gone() is None


def test_a_pool_that_was_passed_in_stays_open() -> None:
    with open_cpu_pool(2) as pool:
        with RoundPipe(net(), devices=pool):
            pass
        with RoundPipe(net(), devices=pool) as second:
            assert second(X).shape == (4, 2)
