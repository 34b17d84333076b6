"""Models that are no sequence, wrapped in parts: forward, gradients, steps, failures."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import InvalidTypeError, InvalidValueError, StateError
from roundpipe.microbatch.packed import RoundPipePackedData
from roundpipe.wrapping import NoSequenceError, PartedModel
from roundpipe.wrapping.parts import Part
from wrapping.nets import Block, Net, loss_of, token_ids, train, train_plain


def wrap(model: nn.Module, **options: Any) -> PartedModel:
    pipe = wrap_model_to_roundpipe(model, **{"devices": "cpu:2", **options})
    assert isinstance(pipe, PartedModel)
    return pipe


def test_large_modules_are_parts_and_the_rest_stays_on_the_host() -> None:
    net = Net()
    with wrap(net, name="net") as pipe:
        names = "embed, left.0, left.1, right, head"
        assert repr(pipe) == f"PartedModel('net', Net in parts: {names})"
        assert [len(part.model) for part in pipe.wrapped_parts] == [1, 1, 1, 3, 1]
        assert pipe.gate is net.gate


def test_outputs_and_gradients_are_the_models_own() -> None:
    net, plain = Net(), Net()
    with wrap(net) as pipe:
        loss = loss_of(pipe, token_ids())
        loss.backward()
        pipe.synchronize()
        expected = loss_of(plain, token_ids())
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, parameter in plain.named_parameters():
            got = net.get_parameter(name).grad
            torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)
        with torch.no_grad():
            assert not pipe(token_ids()).requires_grad
        assert not pipe(
            token_ids(), roundpipe_run_config=RoundPipeRunConfig(requires_grad=False)
        ).requires_grad


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_train_the_whole_model(is_async: bool) -> None:
    net, plain = Net(), Net()
    with wrap(net) as pipe:
        losses = train(pipe, 4, is_async=is_async)
    expected = train_plain(plain, 4, stale=is_async)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert expected[3] < expected[1]
    for name, parameter in plain.named_parameters():
        got = net.get_parameter(name)
        torch.testing.assert_close(got, parameter, rtol=1e-4, atol=1e-6, msg=name)


def test_a_step_of_an_optimizer() -> None:
    net, plain = Net(), Net()
    with wrap(net) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5, momentum=0.9)
        losses = []
        for seed in range(3):
            loss = loss_of(pipe, token_ids(seed=seed))
            loss.backward()
            losses.append(loss.item())
            pipe.step(optimizer)
        pipe.synchronize()
    torch.testing.assert_close(losses, train_plain(plain, 3, stale=False), rtol=1e-5, atol=0)
    for name, parameter in plain.named_parameters():
        got = net.get_parameter(name)
        torch.testing.assert_close(got, parameter, rtol=1e-4, atol=1e-6, msg=name)


def test_masters_can_have_another_dtype() -> None:
    net = Net().to(torch.bfloat16)
    with wrap(net, optim_dtype=torch.float32) as pipe:
        assert {p.dtype for p in pipe.optim_parameters()} == {torch.float32}
        with OptimizerCtx():
            assert len(list(pipe.parameters())) == len(list(net.parameters()))
        train(pipe, 1, is_async=False)
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_gradients_accumulate_over_calls() -> None:
    net, plain = Net(), Net()
    with wrap(net) as pipe:
        for seed in (1, 2):
            loss_of(pipe, token_ids(seed=seed)).backward()
            loss_of(plain, token_ids(seed=seed)).backward()
        pipe.synchronize()
        for name, parameter in plain.named_parameters():
            got = net.get_parameter(name).grad
            torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
        pipe.zero_grad()
        assert all(p.grad is None for p in net.parameters())


def test_state_dict_has_the_models_keys_and_loads_back() -> None:
    net = Net()
    with wrap(net) as pipe:
        state = {key: value.clone() for key, value in pipe.state_dict().items()}
        assert set(state) == set(Net().state_dict())
        train(pipe, 1, is_async=False)
        assert not torch.equal(state["gate.weight"], net.gate.weight)
        pipe.load_state_dict(state)
        torch.testing.assert_close(loss_of(pipe, token_ids()), loss_of(Net(), token_ids()))
        train(pipe, 1, is_async=True)
        names = [name for name, _ in pipe.optim_named_parameters()]
        assert names == [name for name, _ in net.named_parameters()]


def test_attributes_set_by_forward_and_by_the_user_are_the_models() -> None:
    net: Any = Net()
    with wrap(net) as pipe:
        pipe(token_ids())
        assert (net.calls, pipe.calls) == (1, 1)
        pipe.calls = 10
        pipe(token_ids())
        assert net.calls == 11


def test_training_modes_reach_every_module() -> None:
    class Dropping(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            result = super().forward(ids)
            return torch.zeros_like(result) if self.training and self.head.training else result

    net = Dropping()
    with wrap(net) as pipe:
        assert not pipe(token_ids()).any()
        assert pipe.eval() is pipe
        assert pipe(token_ids()).any()
        net.head.train()
        assert pipe(token_ids()).any()
        net.train()
        assert not pipe(token_ids()).any()


def test_forward_backward_is_refused_with_the_reason() -> None:
    with wrap(Net()) as pipe:
        with pytest.raises(NoSequenceError, match=r"Net was wrapped by size, in 5 parts \(embed, "):
            pipe.forward_backward((token_ids(),))
        with pytest.raises(NotImplementedError, match=r"call forward and then backward\(\)"):
            pipe.forward_backward()


def test_a_model_that_is_one_sequence_is_an_ordinary_roundpipe() -> None:
    net = nn.Sequential(Block(), nn.Sequential(Block(), nn.GELU()), nn.Sequential(Block()))
    with wrap_model_to_roundpipe(net, devices="cpu:2") as pipe:
        assert isinstance(pipe, RoundPipe)
        assert len(pipe.model) == 4
        assert set(pipe.state_dict()) == set(net.state_dict())
        pipe.forward_backward((torch.ones(4, 64),), loss_fn=lambda out, _: out.sum())


def test_a_model_that_fits_in_one_part_is_one_layer() -> None:
    with wrap_model_to_roundpipe(Net(), upper_threshold=2**30, devices="cpu:2") as pipe:
        assert isinstance(pipe, RoundPipe)
        loss = pipe.forward_backward((token_ids(),), loss_fn=lambda out, _: out.sum())
        assert loss.shape == ()
    with wrap_model_to_roundpipe(nn.Linear(2, 2), devices="cpu:2") as pipe:
        assert isinstance(pipe, RoundPipe)  # small, but there is nothing else


class Tied(Net):
    """The head uses the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_tied_modules_stay_on_the_host_and_train_right() -> None:
    net, plain = Tied(), Tied()
    with wrap(net) as pipe:
        assert repr(pipe).endswith("in parts: left.0, left.1, right)")
        losses = train(pipe, 3, is_async=True)
    torch.testing.assert_close(losses, train_plain(plain, 3, stale=True), rtol=1e-5, atol=0)
    assert net.head.weight is net.embed.weight
    torch.testing.assert_close(net.head.weight, plain.head.weight, rtol=1e-4, atol=1e-6)


class ReadsWeights(Net):
    """Uses the embedding's weights without tying them, and calls a child of a sequence."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(ids) @ self.embed.weight
        for layer in self.right:
            hidden = layer(hidden)
        result: torch.Tensor = self.right[len(self.right) - 1](hidden)
        return result


def test_what_code_reads_of_a_part_is_the_original() -> None:
    net, plain = ReadsWeights(), ReadsWeights()

    def loss(model: Any) -> torch.Tensor:
        result: torch.Tensor = model(token_ids()).square().mean()
        return result

    with wrap(net) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.01)
        for _ in range(3):
            loss(pipe).backward()
            pipe.step(optimizer.step, is_async=True)
            pipe.step(optimizer.zero_grad, is_async=False)
        pipe.synchronize()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(plain).backward()
        optimizer.step()
    for name, parameter in plain.named_parameters():
        got = net.get_parameter(name)
        torch.testing.assert_close(got, parameter, rtol=1e-4, atol=1e-6, msg=name)


def test_neighbours_with_options_of_their_own_exchange_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[bool] = []
    forward = Part.forward

    def watched(self: Part, *args: Any, **kwargs: Any) -> Any:
        packed.append(isinstance(args[0], RoundPipePackedData))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Part, "forward", watched)
    net = nn.Sequential(Block(), Block(), nn.Identity(), Block(), nn.Flatten())
    config = RoundPipeRunConfig(recompute_grain="layer")
    inputs = torch.randn(7, 3, 64)
    with wrap(net, override_config={"1": config}, skip_modules=["4"]) as pipe:
        assert [part.model_run_config for part in pipe.wrapped_parts] == [
            RoundPipeRunConfig(),
            config,
            RoundPipeRunConfig(),
        ]
        output = pipe(inputs)
        assert packed == [False, True, True]
        torch.testing.assert_close(output, net(inputs), rtol=1e-6, atol=1e-6)
        output.sum().backward()
        pipe.synchronize()
        assert all(p.grad is not None for p in net.parameters())


def test_options_of_the_model_and_of_a_call_reach_the_parts() -> None:
    seen: list[int] = []

    class Watching(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(len(hidden))
            return super().forward(hidden)

    net = Net()
    net.left[0] = Watching()
    with wrap(net, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as pipe:
        with torch.no_grad():
            pipe(token_ids())
            pipe(token_ids(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert seen == [3, 3, 6]


@pytest.mark.parametrize("name", ["split_input", "merge_output", "execute_plan", "output_device"])
def test_options_that_belong_to_one_part_are_refused(name: str) -> None:
    from roundpipe import ModelExecutePlan

    values = {"execute_plan": ModelExecutePlan([range(1)], [range(1)]), "output_device": "cpu"}
    config = RoundPipeRunConfig(**{name: values.get(name, False)})  # type: ignore[arg-type]
    match = f"{name} was given for a model that is wrapped in several parts"
    with pytest.raises(InvalidValueError, match=match):
        wrap_model_to_roundpipe(Net(), devices="cpu:2", model_run_config=config)
    with wrap(Net()) as pipe, pytest.raises(InvalidValueError, match=match):
        pipe(token_ids(), roundpipe_run_config=config)


class Failing(Net):
    """Fails where it is told to, after its buffers have moved."""

    fails: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(LENGTH := 6)
        assert LENGTH == 6

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result = self.bn(super().forward(ids))
        if self.fails == "forward":
            raise OSError("broken")
        if self.fails == "backward":
            result.register_hook(_raise)
        assert isinstance(result, torch.Tensor)
        return result


def _raise(_grad: torch.Tensor) -> None:
    raise OSError("broken")


def test_a_failing_forward_drops_gradients_and_moves_no_buffer() -> None:
    net: Any = Failing()
    with wrap(net) as pipe:
        loss_of(pipe, token_ids()).backward()
        before = net.bn.running_mean.clone()
        pipe.fails = "forward"
        with pytest.raises(OSError, match="broken") as caught:
            pipe(token_ids())
        assert any("gradients accumulated" in note for note in vars(caught.value)["__notes__"])
        assert torch.equal(net.bn.running_mean, before)
        pipe.fails = None
        pipe.synchronize()
        assert all(p.grad is None for p in net.parameters())
        train(pipe, 1, is_async=True)


class FailingBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = super().forward(hidden)
        if result.requires_grad:
            result.register_hook(_raise)
        return result


def test_a_part_failing_in_backward_drops_the_gradients_of_all() -> None:
    net = Net()
    net.left[0] = FailingBlock()
    with wrap(net) as pipe:
        loss = loss_of(pipe, token_ids())
        with pytest.raises(OSError, match="broken"):
            loss.backward()
        pipe.synchronize()
        assert all(p.grad is None for p in net.parameters())


def test_a_failing_step_is_raised_by_the_next_call_once() -> None:
    def fail() -> None:
        raise OSError("no step")

    with wrap(Net()) as pipe:
        loss_of(pipe, token_ids()).backward()
        pipe.step(fail)
        with pytest.raises(OSError, match="no step"):
            pipe.synchronize()
        pipe(token_ids())
        with pytest.raises(OSError, match="no step"):
            pipe.step(fail, is_async=False)


def test_calls_at_the_wrong_moment() -> None:
    with wrap(Net()) as pipe:
        pipe.step(lambda: None)

        def call_from_step() -> None:
            pipe(token_ids())

        with pytest.raises(StateError, match="was called from its own step function"):
            pipe.step(call_from_step, is_async=False)

        class Calling(Net):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = other(ids)
                return result

        with wrap(Calling()) as other, pytest.raises(StateError, match="another call of it"):
            other(token_ids())
        with pytest.raises(InvalidTypeError, match="step_fn is a int"):
            pipe.step(3)  # type: ignore[arg-type]


def test_what_cannot_be_copied_says_what_can() -> None:
    with wrap(Net()) as pipe:
        with pytest.raises(InvalidTypeError, match="copy the plain model after synchronize"):
            copy.deepcopy(pipe)
        with pytest.raises(InvalidTypeError, match="cannot be pickled"):
            pickle.dumps(pipe)
        with pytest.raises(InvalidTypeError, match="wrapped already"):
            wrap_model_to_roundpipe(pipe)


def test_frozen_parts_get_no_gradients() -> None:
    net = Net()
    net.left.requires_grad_(False)
    with wrap(net) as pipe:
        before = [p.clone() for p in net.left.parameters()]
        train(pipe, 2, is_async=True)
        assert all(torch.equal(a, b) for a, b in zip(net.left.parameters(), before, strict=True))
        assert len(list(pipe.optim_parameters())) == len(
            [p for p in net.parameters() if p.requires_grad]
        )


def test_a_sequence_with_a_hole_fails_as_it_does_unwrapped() -> None:
    def model() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        inner.register_module("1", None)
        return nn.Sequential(nn.Linear(4, 4), inner)

    with pytest.raises(TypeError) as plain:
        model()(torch.ones(2, 4))
    with (
        wrap_model_to_roundpipe(model(), False, lower_threshold=0, devices="cpu:1") as pipe,
        pytest.raises(TypeError) as wrapped,
    ):
        pipe(torch.ones(2, 4))
    assert str(wrapped.value) == str(plain.value)
