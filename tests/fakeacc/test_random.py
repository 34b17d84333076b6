"""Random numbers depend on the seed and the order of the launches, never on timing."""

import pytest
import torch

from support import fakeacc


def draw(device: str = "fakeacc:0") -> torch.Tensor:
    return torch.randn(64, device=device).cpu()


def test_a_seed_repeats_the_numbers_on_every_device() -> None:
    torch.manual_seed(7)
    first = [draw("fakeacc:0"), draw("fakeacc:1")]
    torch.manual_seed(7)
    assert torch.equal(draw("fakeacc:0"), first[0])
    assert torch.equal(draw("fakeacc:1"), first[1])


def test_launches_draw_different_numbers_of_the_right_distribution() -> None:
    torch.manual_seed(0)
    a = torch.randn(20_000, device="fakeacc:0").cpu()
    b = torch.randn(20_000, device="fakeacc:0").cpu()
    assert not torch.equal(a, b)
    assert abs(a.mean().item()) < 0.05
    assert abs(a.std().item() - 1.0) < 0.05
    assert abs((a * b).mean().item()) < 0.05


def test_a_state_can_be_kept_and_given_back() -> None:
    module = torch.get_device_module("fakeacc")
    state = module.get_rng_state("fakeacc:0")
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"
    first = draw()
    assert not torch.equal(draw(), first)
    module.set_rng_state(state, "fakeacc:0")
    assert torch.equal(draw(), first)
    with pytest.raises(RuntimeError, match="a random state of fakeacc has 16 bytes, not 3"):
        module.set_rng_state(torch.zeros(3, dtype=torch.uint8), "fakeacc:0")


def test_fork_rng_leaves_the_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0, 1], device_type="fakeacc"):
        draw()
    assert torch.equal(draw(), expected)


def test_device_draws_leave_the_host_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(8)
    torch.manual_seed(3)
    draw()
    torch.nn.functional.dropout(torch.ones(8, device="fakeacc:0"))
    assert torch.equal(torch.randn(8), expected)


def test_a_generator_of_its_own() -> None:
    generator = torch.Generator("fakeacc:1").manual_seed(11)
    first = torch.rand(16, device="fakeacc:1", generator=generator).cpu()
    generator.manual_seed(11)
    assert torch.equal(torch.rand(16, device="fakeacc:1", generator=generator).cpu(), first)
    with pytest.raises(RuntimeError, match="Expected a generator of fakeacc:1 but found one of"):
        torch.empty(3, device="fakeacc:1").normal_(generator=torch.Generator())


def test_timing_does_not_change_the_numbers() -> None:
    stream = torch.Stream("fakeacc:0")
    torch.manual_seed(5)
    calm = [draw(), draw()]
    torch.manual_seed(5)
    with fakeacc.hold(stream):
        with stream:
            late = torch.randn(64, device="fakeacc:0")
        early = draw()
    stream.synchronize()
    assert torch.equal(late.cpu(), calm[0])
    assert torch.equal(early, calm[1])


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_dropout_keeps_the_expectation(probability: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(20_000, device="fakeacc:0", requires_grad=True)
    y = torch.nn.functional.dropout(x, probability)
    y.sum().backward()
    kept = (y.detach() != 0).float().mean().item()
    assert abs(kept - (1 - probability)) < 0.02
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert torch.equal(torch.nn.functional.dropout(x, probability, training=False), x)


def test_an_operator_that_draws_without_a_generator_is_refused() -> None:
    q = torch.ones(1, 1, 4, 8, device="fakeacc:0")
    with pytest.raises(NotImplementedError, match="draws random numbers but takes no generator"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
