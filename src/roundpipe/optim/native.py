"""The compiled kernels: finding the library, choosing the instruction set, packing a step.

The library has a plain C interface (``csrc/abi.h``) and is called through ctypes, which releases
the GIL during a step. It is optional: :func:`load_kernels` returns ``None`` without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from roundpipe.errors import InvalidValueError
from roundpipe.trace import logger

MAX_STATES = 3
MAX_SCALARS = 8
CHOICE_VARIABLE = "ROUNDPIPE_OPTIM_KERNELS"

# struct Task of csrc/abi.h
_TASK = struct.Struct(f"={'q'}{'Q' * (3 + MAX_STATES)}{'d' * (2 + MAX_SCALARS)}Q4i")


class Isa(IntEnum):
    """Instruction sets that the kernels are compiled for, in order of preference."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2


class Algorithm(IntEnum):
    """The update rules, as numbered in ``csrc/abi.h``."""

    ADAM = 0
    SGD = 1
    ADAGRAD = 2
    RMSPROP = 3
    ADAMAX = 4
    NADAM = 5
    RADAM = 6
    ADADELTA = 7
    ASGD = 8
    RPROP = 9
    LION = 10


DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Task:
    """One parameter's part of a step. All tensors have the same shape and layout.

    Attributes:
        param: float32, updated in place.
        grad: float32, bfloat16 or float16.
        published: also receives the new parameter, rounded to its dtype (those of ``grad``), or
            ``None``.
        states: up to three tensors, all float32 or all bfloat16, updated in place.
        scalars: up to eight constants; their meaning is the algorithm's.
        variant: selects among the forms of one algorithm.
        grad_scale: multiplies the gradient first; negative to maximize.
        coupled_decay: L2 decay, added to the gradient.
        seed: of the stochastic rounding of bfloat16 states.
    """

    param: torch.Tensor
    grad: torch.Tensor
    published: torch.Tensor | None
    states: tuple[torch.Tensor, ...]
    scalars: tuple[float, ...]
    variant: int = 0
    grad_scale: float = 1.0
    coupled_decay: float = 0.0
    seed: int = 0

    def pack(self) -> bytes:
        """The task as the library reads it; valid while the tensors live."""
        pointers = [state.data_ptr() for state in self.states]
        pointers += [0] * (MAX_STATES - len(pointers))
        published = self.published
        return _TASK.pack(
            self.param.numel(),
            self.param.data_ptr(),
            self.grad.data_ptr(),
            0 if published is None else published.data_ptr(),
            *pointers,
            self.grad_scale,
            self.coupled_decay,
            *self.scalars,
            *(0.0,) * (MAX_SCALARS - len(self.scalars)),
            self.seed,
            DTYPE_CODES[self.grad.dtype],
            0 if published is None else DTYPE_CODES[published.dtype],
            DTYPE_CODES[self.states[0].dtype] if self.states else 0,
            self.variant,
        )


class Kernels:
    """The loaded library, bound to one instruction set.

    Args:
        library: the open shared library.
        isa: the instruction set to run.
    """

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        self.isa = isa
        self._library = library
        self._step = library.roundpipe_step
        self._step.argtypes = [
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_int32,
        ]
        self._advise = library.roundpipe_advise_large_pages
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._advise.restype = None

    def available(self) -> list[Isa]:
        """The instruction sets that this machine can run."""
        return [isa for isa in Isa if self._library.roundpipe_has_isa(int(isa))]

    def bound_to(self, isa: Isa) -> Kernels:
        """The same library, running another instruction set."""
        return Kernels(self._library, isa)

    def step(self, algorithm: Algorithm, tasks: list[Task]) -> None:
        """Update all tasks' tensors, on at most ``torch.get_num_threads()`` threads.

        Args:
            algorithm: the update rule.
            tasks: one per parameter; no two may share memory.
        """
        packed = b"".join(task.pack() for task in tasks)
        code = self._step(
            int(self.isa), int(algorithm), packed, len(tasks), torch.get_num_threads()
        )
        if code != 0:
            variants = sorted({task.variant for task in tasks})
            raise InvalidValueError(
                f"no {self.isa.name} kernel for {algorithm.name}, one of variants {variants}; "
                f"this machine runs {[isa.name for isa in self.available()]}"
            )

    def advise_large_pages(self, tensor: torch.Tensor) -> None:
        """Ask for large pages for a tensor that nothing was written to yet."""
        self._advise(tensor.data_ptr(), tensor.nbytes)


@functools.cache
def load_kernels() -> Kernels | None:
    """The compiled kernels for this machine, or ``None`` with one line in the log that says why.

    The environment variable ``ROUNDPIPE_OPTIM_KERNELS`` chooses: ``auto`` (the default: the best
    instruction set of this machine), ``generic``, ``avx2``, ``avx512``, or ``off``. It is read
    once, and all callers get the same immutable object.

    Raises:
        InvalidValueError: the variable names no instruction set, or one that this machine lacks.
    """
    choice = os.environ.get(CHOICE_VARIABLE, "auto").lower()
    if choice == "off":
        _log_fallback(f"{CHOICE_VARIABLE}=off")
        return None
    library, reason = _open_library(Path(__file__).parent)
    if library is None:
        _log_fallback(reason)
        return None
    kernels = Kernels(library, Isa.GENERIC)
    return kernels.bound_to(_choose(choice, kernels.available()))


def _log_fallback(reason: str) -> None:
    logger.warning("roundpipe.optim runs torch's own optimizers on the CPU: %s", reason)


def _choose(choice: str, available: list[Isa]) -> Isa:
    names = {isa.name.lower(): isa for isa in available}
    if choice == "auto":
        return max(available)
    if choice not in names:
        raise InvalidValueError(
            f"{CHOICE_VARIABLE} is {choice!r}; expected auto, off or what this machine runs: "
            f"{', '.join(names)}"
        )
    return names[choice]


def _candidates(folder: Path) -> Iterator[Path]:
    """Built libraries that are meant for this interpreter."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.is_file():
            yield path


def _open_library(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    reason = "the package was built without its compiled kernels"
    for path in _candidates(folder):
        try:
            library = ctypes.CDLL(str(path))
            library.roundpipe_task_bytes.restype = ctypes.c_int64
            if library.roundpipe_task_bytes() == _TASK.size:
                return library, ""
            reason = f"{path.name} was built from another version of the sources; build it again"
        except (OSError, AttributeError) as error:
            reason = f"{path.name} cannot be loaded ({error})"
    return None, reason
