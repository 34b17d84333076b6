"""One parameter store that speaks for several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.parameters import ParameterStore
from roundpipe.workers import Scope

_VERSIONS = ("submitted_version", "entitled_version", "synchronized_version")


class GroupStore(ParameterStore):
    """The store of the parameters that stay on the host, and the stores of the parts.

    All have the records of all, so a step takes, and a failure drops, the gradients of all; and all
    have the same versions at any time. Each publishes the parameters of its own layers.

    Args:
        host: holds the parameters that stay on the host, as one layer.
        parts: the stores of the parts; no parameter is in two of them, or on the host too.
        names: for each parameter (by identity) the name shown to users.
        optim_dtype: dtype of floating-point masters.
    """

    steps_by_layer = False  # a part's layers have numbers of their own

    def __init__(
        self,
        host: nn.Module,
        parts: Sequence[ParameterStore],
        names: dict[int, str],
        optim_dtype: torch.dtype | None,
    ) -> None:
        self._parts = tuple(parts)
        super().__init__([host], names, optim_dtype)
        for part in self._parts:
            self._records.update(part._records)
        for part in self._parts:
            part._records, part._dirty, part._lock = self._records, self._dirty, self._lock

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _VERSIONS:
            for part in self._parts:
                setattr(part, name, value)

    def wait_host_readable(self, who: str) -> None:
        """Block until the parameters on the host hold the version that calls read (rule 3)."""
        self.wait_readable(0, self.entitled_version, who, Scope())

    def wait_all_readable(self, who: str) -> None:
        """Block until all parameters hold the version that calls read (rule 3)."""
        for store in (self, *self._parts):
            for layer in store.layers:
                store.wait_readable(layer.index, self.entitled_version, who, Scope())

    def drop_gradients(self) -> bool:
        """As in :class:`ParameterStore`, with those that backward has left on the parameters."""
        dropped = super().drop_gradients()
        for record in self.records():
            dropped = dropped or record.parameter.grad is not None
            record.parameter.grad = None
        return dropped

    def expose_gradients(self) -> None:
        """As in :class:`ParameterStore`, with those that backward has left on the parameters."""
        self.adopt_user_gradients()
        super().expose_gradients()

    def declared_reads(self) -> list[int]:
        """As in :class:`ParameterStore`: the host's, then each part's."""
        parts = (part.declared_reads() for part in self._parts)
        return [*super().declared_reads(), *itertools.chain.from_iterable(parts)]

    def publish(self, version: int, declared: Sequence[int]) -> None:
        """As in :class:`ParameterStore`, of all; a failure in one leaves no other behind."""
        numbers = iter(declared)
        mine = list(itertools.islice(numbers, len(self.layers)))
        failures: list[BaseException] = []
        try:
            super().publish(version, mine)
        except BaseException as error:  # noqa: BLE001 - raised below, the first of them
            failures.append(error)
        for part in self._parts:
            theirs = list(itertools.islice(numbers, len(part.layers)))
            try:
                part.publish(version, theirs)
            except BaseException as error:  # noqa: BLE001 - likewise
                failures.append(error)
        if failures:
            raise failures[0]
