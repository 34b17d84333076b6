"""What a microbatch waits for before it may enter: values that another model's call still makes.

call of model A      stages ... ─▶ last stage ─▶ output of microbatch m
                                                      │ wait, take
call of model B                                       └─▶ first stage, microbatch m ─▶ ...
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from .devices import DevicePool
from .microbatch.packed import PendingPiece
from .transfer import Border, Value
from .workers import Scope


class Arrival(PendingPiece):
    """One value of packed data whose call may still be on the devices."""

    @property
    @abstractmethod
    def may_require_grad(self) -> bool:
        """Whether gradients may be wanted for it; certain once it is there."""

    @property
    @abstractmethod
    def call(self) -> Any:
        """The call that makes it."""

    @abstractmethod
    def wait(self, who: str, scope: Scope) -> None:
        """Block the calling worker until it has left that call's last stage.

        Raises:
            Cancelled: ``scope`` failed, as it does when that call fails.
        """

    @abstractmethod
    def take(self, pool: DevicePool) -> Any:
        """It, for a run on the devices of ``pool``: a value if it is a tensor."""

    @abstractmethod
    def tensor(self) -> Any:
        """It, as the caller sees it: part of the graph that gradients flow back through."""


class Entry:
    """The places in one microbatch's arguments and label where something has yet to arrive."""

    def __init__(self, borders: Iterable[Border]) -> None:
        self._places = [
            (border, position, leaf)
            for border in borders
            for position, leaf in enumerate(border.leaves)
            if isinstance(leaf, Arrival)
        ]
        self._values: list[tuple[Arrival, Value]] = []
        self._arrived = False

    @property
    def arrivals(self) -> list[Arrival]:
        """What is awaited."""
        return [arrival for _, _, arrival in self._places]

    def arrive(self, who: str, scope: Scope, pool: DevicePool) -> None:
        """Wait for everything and put it in its place. Called by the first stage's worker.

        Raises:
            Cancelled: ``scope`` failed, as it does when a call that is waited for fails.
        """
        if self._arrived:
            return
        known: dict[int, Any] = {}
        for border, position, arrival in self._places:
            arrival.wait(who, scope)
            made = arrival.take(pool)
            leaf = known.setdefault(id(made), made.twin() if isinstance(made, Value) else made)
            if isinstance(leaf, Value):
                self._values.append((arrival, leaf))
            border.leaves[position] = leaf
        self._arrived = True

    def sources(self) -> list[tuple[torch.Tensor, Value]]:
        """The caller's tensors that shall receive gradients, with their values.

        Called by the caller when the calls that made them are over; waits otherwise.
        """
        wanted = {id(v): (a, v) for a, v in reversed(self._values) if v.requires_grad}
        return [(arrival.tensor(), value) for arrival, value in reversed(wanted.values())]
