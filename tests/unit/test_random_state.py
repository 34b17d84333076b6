"""Random numbers tied to (call, microbatch, layer)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from roundpipe.random_state import LayerRandomness, draw_call_seed, layer_seed

KEY = (0, True, True)


@given(
    call=st.integers(0, 2**63 - 2),
    one=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    other=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_seeds_differ_between_microbatches_and_layers_and_fit_63_bits(
    call: int, one: tuple[int, int], other: tuple[int, int]
) -> None:
    seed = layer_seed(call, *one)
    assert 0 <= seed < 2**63
    assert (seed == layer_seed(call, *other)) == (one == other)
    assert seed != layer_seed(call + 1, *one)


def test_the_callers_generator_decides_a_calls_seed() -> None:
    torch.manual_seed(3)
    first, second = draw_call_seed(), draw_call_seed()
    torch.manual_seed(3)
    assert (draw_call_seed(), draw_call_seed()) == (first, second)
    assert first != second


def test_a_layer_draws_what_its_seed_says_and_leaves_the_generator_alone() -> None:
    randomness = LayerRandomness()
    before = torch.default_generator.get_state()
    draws = [randomness.run(KEY, seed, lambda: torch.rand(3)) for seed in (1, 2, 1)]
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_layer_that_draws_nothing_is_not_seeded_again_until_watched_anew() -> None:
    randomness = LayerRandomness()
    assert randomness.run(KEY, 1, lambda: 5) == 5
    torch.manual_seed(0)
    state = torch.default_generator.get_state()
    assert torch.equal(
        randomness.run(KEY, 1, torch.default_generator.get_state), state
    )  # not seeded: it would be another state
    # The same layer in another mode is another matter.
    seeded = randomness.run((0, False, True), 1, torch.default_generator.get_state)
    assert not torch.equal(seeded, state)
    randomness.forget()
    assert torch.equal(randomness.run(KEY, 1, torch.default_generator.get_state), seeded)


def test_the_generator_is_put_back_when_a_layer_fails() -> None:
    before = torch.default_generator.get_state()

    def fail() -> None:
        torch.rand(1)
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer"):
        LayerRandomness().run(KEY, 1, fail)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_layer_that_begins_to_draw_is_noticed_and_the_callers_numbers_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    randomness = LayerRandomness()
    randomness.run(KEY, 1, lambda: None)
    before = torch.default_generator.get_state()
    with caplog.at_level(logging.WARNING, logger="roundpipe"), randomness.watch_call("net"):
        randomness.run(KEY, 1, lambda: torch.rand(1))
    assert torch.equal(torch.default_generator.get_state(), before)
    assert "a layer of net drew random numbers for the first time" in caplog.text
    caplog.clear()
    with randomness.watch_call("net"):
        randomness.run(KEY, 1, lambda: torch.rand(1))
    assert caplog.text == ""


STAGE = (KEY, (1, True, True))


class _DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.rand(1)


def test_backward_that_draws_is_found_and_leaves_the_generator_alone() -> None:
    randomness = LayerRandomness()
    x = torch.ones(1, requires_grad=True)
    before = torch.default_generator.get_state()
    told: list[bool] = []

    def run(draws: bool) -> None:
        told.append(draws)
        y: torch.Tensor = _DrawsInBackward.apply(x)
        y.backward()

    for _ in range(2):
        randomness.run_backward(STAGE, run)
        assert torch.equal(torch.default_generator.get_state(), before)
    assert told == [True, True]
    assert randomness.may_draw(STAGE)


def test_a_checkpoint_in_backward_counts_as_drawing_although_it_puts_the_generator_back() -> None:
    randomness = LayerRandomness()
    x = torch.ones(4, requires_grad=True)
    randomness.run(KEY, 1, lambda: None)
    assert randomness.known_quiet([KEY])

    y: torch.Tensor = checkpoint(
        lambda t: torch.nn.functional.dropout(t * 2) * 3, x, use_reentrant=False
    )
    randomness.run_backward(STAGE, lambda _: y.sum().backward())
    assert randomness.may_draw(STAGE)
    assert not randomness.known_quiet([KEY])  # the caller must not draw beside it


def test_backward_that_draws_nothing_is_not_serialised() -> None:
    randomness = LayerRandomness()
    x = torch.ones(1, requires_grad=True)
    told: list[bool] = []

    def run(draws: bool) -> None:
        told.append(draws)
        (x * 2).backward()

    for _ in range(2):
        randomness.run_backward(STAGE, run)
    assert told == [True, False]  # the first time it might have
    assert not randomness.may_draw(STAGE)


def test_a_variant_of_a_layer_is_watched_anew() -> None:
    randomness = LayerRandomness()
    randomness.run(KEY, 1, lambda: None, variant=(3,))
    state = torch.default_generator.get_state()
    assert torch.equal(
        randomness.run(KEY, 1, torch.default_generator.get_state, variant=(3,)), state
    )
    watched = randomness.run(KEY, 1, torch.default_generator.get_state, variant=(2,))
    assert not torch.equal(watched, state)


def test_what_a_compiler_does_to_the_generator_is_put_right_without_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = iter([4, 5])
    monkeypatch.setattr("roundpipe.random_state.compiled_graphs", lambda: next(graphs))
    before = torch.default_generator.get_state()
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        with LayerRandomness().watch_call("net"):
            torch.rand(1)
    assert torch.equal(torch.default_generator.get_state(), before)
    assert caplog.text == ""
