"""Stochastic rounding of 16-bit optimizer states in torch operations, as the kernels do it.

A moving average with factor 0.999 changes by a thousandth of the difference per step, less than
half of bfloat16's spacing: rounded to nearest it would stand still. Rounding up or down at random,
with the probabilities that make the expected value exact, keeps it right in the mean (Gupta et al.,
"Deep Learning with Limited Numerical Precision", 2015).

The random numbers are a hash of parameter, step, state and element: a run gives the same bits on
any number of threads, and after a resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def rounding_seed(ordinal: int, step: int) -> int:
    """The seed for one parameter's states in one step.

    Args:
        ordinal: the parameter's number in its optimizer.
        step: how many steps it has done before.
    """
    return ((ordinal & 0x7FFFFFFF) << 32) + step


def round_moment(moment: Tensor, seed: int, state_index: int) -> Tensor:
    """``moment`` (float32, any dense layout) as bfloat16, rounded up or down at random.

    Args:
        moment: the exact values.
        seed: from :func:`rounding_seed`.
        state_index: the state's number among those of its parameter.
    """
    rounded = torch.empty_like(moment, dtype=torch.bfloat16)
    in_memory_order = torch.as_strided(moment, (moment.numel(),), (1,))
    bits = in_memory_order.view(torch.int32).to(torch.int64) & _MASK
    index = torch.arange(moment.numel(), dtype=torch.int64)
    # Elements beyond 2**32 get another seed, in the kernels too: their index has 32 bits.
    mixed = ((index >> 32) + seed) * _signed64(0x9E3779B97F4A7C15)
    seeds = (((mixed >> 32) & _MASK) + 0x632BE5AB * state_index) & _MASK
    noise = _hash(((index & _MASK) * 0x9E3779B9 + seeds) & _MASK) >> 16
    kept = ((bits + noise) & _MASK) >> 16
    quiet_nan = (bits >> 16) | 0x40
    kept = torch.where(in_memory_order.isnan(), quiet_nan, kept)
    signed = torch.where(kept >= 0x8000, kept - 0x10000, kept).to(torch.int16)
    torch.as_strided(rounded, (moment.numel(),), (1,)).copy_(signed.view(torch.bfloat16))
    return rounded


def _hash(values: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 without its last shift, on 32-bit numbers held in int64."""
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & _MASK
    return ((values ^ (values >> 13)) * 0xC2B2AE35) & _MASK


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
