"""Several host threads at once: right values, no report, no hang."""

import threading
from collections.abc import Callable

import torch

from support import fakeacc

THREADS = 4


def run_threads(work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - every failure must reach the test
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_four_threads_with_three_streams_each_and_empty_cache_among_them() -> None:
    """Every thread copies in, computes and copies out on streams of its own, on either device."""

    def work(index: int) -> None:
        device = f"fakeacc:{index % 2}"
        up, compute, down = (torch.Stream(device) for _ in range(3))
        host = torch.full((64, 64), float(index + 1)).pin_memory()
        result = torch.empty(64, 64, pin_memory=True)
        for step in range(25):
            with up:
                x = host.to(device, non_blocking=True)
            compute.wait_stream(up)
            with compute:
                y = x @ x + step
            x.record_stream(compute)
            down.wait_stream(compute)
            with down:
                result.copy_(y, non_blocking=True)
                arrived = down.record_event()
            y.record_stream(down)
            del x, y
            arrived.synchronize()
            assert result.eq(64.0 * (index + 1) ** 2 + step).all()
            if step % 10 == index:
                torch.accelerator.empty_cache()

    with fakeacc.latency(jitter_ms=0.3):
        run_threads(work)


def test_threads_on_one_device_train_models_of_their_own() -> None:
    def train(index: int) -> list[float]:
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(8, 8, generator=generator).to("fakeacc:0").requires_grad_()
        x = torch.randn(4, 8, generator=generator).to("fakeacc:0")
        losses = []
        for _ in range(5):
            loss = (x @ weight).square().mean()
            loss.backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
            losses.append(loss.item())
        return losses

    expected = [train(index) for index in range(THREADS)]
    found: dict[int, list[float]] = {}

    def work(index: int) -> None:
        stream = torch.Stream("fakeacc:0")
        with stream:
            found[index] = train(index)

    run_threads(work)
    assert [found[index] for index in range(THREADS)] == expected


def test_a_thread_that_waits_lets_the_others_run() -> None:
    """The host waits in torch with the GIL released; else nobody could release the stream."""
    stream = torch.Stream("fakeacc:0")
    waiting = threading.Event()
    done: list[bool] = []

    def wait() -> None:
        waiting.set()
        stream.synchronize()
        done.append(True)

    with fakeacc.hold(stream):
        stream.record_event()
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        assert done == []
    thread.join(timeout=60)
    assert done == [True]
