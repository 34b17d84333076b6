"""Finding the library, choosing the instruction set, and running without."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optim.cases import copies, parameters, train
from roundpipe import optim
from roundpipe.errors import InvalidValueError
from roundpipe.optim import base, native
from roundpipe.optim.native import CHOICE_VARIABLE, Algorithm, Isa, Kernels, Task, load_kernels

LIBRARY = "_kernels.abi3.so"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let this test load the kernels anew, and the next ones too."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def adam_task(numel: int, variant: int = 0) -> Task:
    return Task(
        param=torch.zeros(numel),
        grad=torch.ones(numel),
        published=None,
        states=(torch.zeros(numel), torch.zeros(numel)),
        scalars=(0.5, 0.9, 0.999, 1e-8, 1.0, 0.0),
        variant=variant,
    )


@pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)
def test_each_instruction_set_steps(isa: Isa, kernels: Kernels) -> None:
    """The other tests run what this machine has; this one says what it has not."""
    if isa not in kernels.available():
        pytest.skip(f"this machine has no {isa.name}")
    task = adam_task(100)
    kernels.bound_to(isa).step(Algorithm.ADAM, [task])
    torch.testing.assert_close(task.param, torch.full((100,), -0.5))


def test_the_best_instruction_set_is_the_default(
    kernels: Kernels, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    loaded = load_kernels()
    assert loaded is not None
    assert loaded.isa == max(kernels.available())
    assert Isa.GENERIC in kernels.available()
    assert load_kernels() is loaded


def test_the_environment_chooses(
    kernels: Kernels, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "Generic")
    loaded = load_kernels()
    assert loaded is not None
    assert loaded.isa == Isa.GENERIC


def test_an_unknown_instruction_set_is_refused(
    kernels: Kernels, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "sse9")
    with pytest.raises(InvalidValueError, match=r"is 'sse9'; expected auto, off or .* generic"):
        load_kernels()


def test_switched_off_it_says_so_once_and_steps_with_torch(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "off")
    params = parameters([(5, 4)])
    expected = copies(params)
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        for _ in range(2):
            train(optim.AdamW(params), params, steps=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"roundpipe.optim runs torch's own optimizers on the CPU: {CHOICE_VARIABLE}=off"
    ]
    for _ in range(2):
        train(torch.optim.AdamW(expected, fused=True), expected, steps=2)
    assert torch.equal(params[0], expected[0])


def _reason(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """What is logged when the package lies in ``folder``."""
    monkeypatch.setattr(native, "__file__", str(folder / "native.py"))
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        assert load_kernels() is None
    (record,) = caplog.records
    return record.getMessage()


def test_a_package_without_library(
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = _reason(tmp_path, monkeypatch, caplog)
    assert reason.endswith("the package was built without its compiled kernels")


@pytest.mark.skipif(
    LIBRARY.removeprefix("_kernels") not in importlib.machinery.EXTENSION_SUFFIXES,
    reason="this interpreter names its libraries in another way",
)
def test_a_library_that_cannot_be_loaded(
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / LIBRARY).write_bytes(b"no library")
    assert f"{LIBRARY} cannot be loaded (" in _reason(tmp_path, monkeypatch, caplog)


def test_a_library_of_other_sources(
    kernels: Kernels,
    fresh: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (built,) = native._candidates(Path(native.__file__).parent)
    shutil.copy(built, tmp_path)
    monkeypatch.setattr(native, "_TASK", struct.Struct("=q"))
    reason = _reason(tmp_path, monkeypatch, caplog)
    assert reason.endswith("was built from another version of the sources; build it again")


def test_an_unknown_kernel_is_refused_and_changes_nothing(kernels: Kernels) -> None:
    good, bad = adam_task(3), adam_task(3, variant=7)
    with pytest.raises(InvalidValueError, match=r"no \w+ kernel for ADAM, one of variants \[0, 7"):
        kernels.step(Algorithm.ADAM, [good, bad])
    assert good.param.tolist() == [0.0] * 3


@pytest.mark.parametrize("algorithm", Algorithm)
def test_both_sides_count_algorithms_and_variants_alike(
    algorithm: Algorithm, kernels: Kernels
) -> None:
    variants = {Algorithm.ADAM: 2, Algorithm.SGD: 3, Algorithm.RMSPROP: 4}.get(algorithm, 1)
    empty = [torch.empty(0) for _ in range(3)]
    for variant in range(-1, variants + 1):
        task = Task(empty[0], empty[0], None, tuple(empty), (0.0,), variant=variant)
        if 0 <= variant < variants:
            kernels.step(algorithm, [task])
        else:
            with pytest.raises(InvalidValueError, match=f"kernel for {algorithm.name}"):
                kernels.step(algorithm, [task])


def test_a_step_uses_the_calling_threads_share_of_the_cores(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device worker that was given one core must not start more threads."""
    asked: list[int] = []
    real = kernels._step

    def spy(isa: int, algorithm: int, tasks: bytes, count: int, threads: int) -> Any:
        asked.append(threads)
        return real(isa, algorithm, tasks, count, threads)

    monkeypatch.setattr(kernels, "_step", spy)
    monkeypatch.setattr(base, "load_kernels", lambda: kernels)
    mine = torch.get_num_threads()
    params = parameters([(3,)])

    def one_core() -> None:
        torch.set_num_threads(1)
        train(optim.SGD(params, lr=0.1), params, steps=1)

    worker = threading.Thread(target=one_core)
    worker.start()
    worker.join()
    torch.set_num_threads(mine)
    train(optim.SGD(params, lr=0.1), params, steps=1)
    assert asked == [1, mine]


def test_the_interpreter_runs_on_during_a_step(kernels: Kernels) -> None:
    """ctypes releases the GIL for functions of a CDLL, and keeps it for those of a PyDLL."""
    assert type(kernels._library) is ctypes.CDLL


def test_optimizers_step_at_the_same_time(kernels: Kernels) -> None:
    models = [parameters([(40_000,), (3, 5)], seed) for seed in range(4)]
    expected = [copies(params) for params in models]
    for params in expected:
        train(optim.AdamW(params), params)
    threads = [
        threading.Thread(target=train, args=(optim.AdamW(params), params)) for params in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for params, others in zip(models, expected, strict=True):
        for param, other in zip(params, others, strict=True):
            assert torch.equal(param, other)


def test_large_states_ask_for_large_pages(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kernels, "advise_large_pages", lambda tensor: asked.append(tensor.nbytes))
    monkeypatch.setattr(base, "load_kernels", lambda: kernels)
    params = parameters([(10,), (base.LARGE_TENSOR_BYTES // 4,)])
    train(optim.AdamW(params), params, steps=2)
    assert asked == [base.LARGE_TENSOR_BYTES] * 2


def test_advice_about_pages_is_harmless_for_any_size(kernels: Kernels) -> None:
    for numel in (0, 1, 3 << 20):
        tensor = torch.ones(numel)
        kernels.advise_large_pages(tensor)
        assert (tensor == 1).all()
