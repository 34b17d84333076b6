"""Optimizers with the interface of ``torch.optim``, fast on the CPU.

Each class is a subclass of torch's optimizer of the same name (Lion has none there): same
arguments, same parameter groups, same ``state_dict``. What is new is how a step runs on the CPU:
one pass of a compiled kernel over each parameter, on the calling thread's share of the cores, with
the GIL released. :meth:`KernelOptimizer.step_fused` also reads 16-bit gradients and writes 16-bit
parameters in that pass.

Without the compiled kernels (the package was built on a machine without a compiler) all of it works
too, on torch's own kernels; one line in the log says so.
"""

from roundpipe.binding import Binding
from roundpipe.optim.adam import Adam, Adamax, AdamW, NAdam, RAdam
from roundpipe.optim.base import KernelOptimizer
from roundpipe.optim.lion import Lion
from roundpipe.optim.sgd import ASGD, SGD, Adadelta, Adagrad, RMSprop, Rprop

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Binding",
    "KernelOptimizer",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]
