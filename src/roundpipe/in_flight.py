"""Forwards that leave their outputs in microbatches: the caller goes on while they run.

    caller              device workers
    A(x, merge False)   stages of A on microbatches 0, 1, 2, ...
       ◀── microbatch 0 is through: the outputs' structure is known
    B(packed)           stages of B on microbatch 0 as soon as A has let it go, then 1, 2, ...
       settles A ◀───── both are over

A call *settles* when the caller has found its devices done and it has taken effect, or failed. Its
model settles it before anything else is done with the model, whoever looks at the packed data does,
and so does the end of a call that they were given to.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .arrivals import Arrival
from .autograd import Bridge
from .buffer_watch import commit_buffers
from .calls import Call
from .devices import DevicePool
from .dispatch import Run
from .errors import InvalidValueError, StateError, Where, add_where
from .microbatch.columns import columns_from_trees
from .microbatch.nodes import is_made_of_tensors
from .microbatch.packed import RoundPipePackedData
from .microbatch.tree import Structure, unflatten
from .results import outputs_of, wait_homecoming
from .stepping import Stepper
from .trace import logger
from .transfer import Border, Value
from .workers import Scope, Uninterrupted

DROPPED = "gradients accumulated since the last step were dropped"


class InFlightCall:
    """A forward that was started, from the caller's side. Used by the caller's thread only.

    Knows nothing of the model's RoundPipe, which can be collected while the call is on its way.

    Args:
        run: its run, not started yet.
        airborne: where its model looks for it until it has settled.
    """

    def __init__(self, run: Run, airborne: Airborne) -> None:
        self.run = run
        self._airborne = airborne
        self.call: Call = run.call
        self.upstream = upstream_of(run.call)
        self.settled = False
        self._error: BaseException | None = None
        self._told = False
        hosts = (v.home() for c in run.call.chains for v in c.borders[0].values() if v.has_host)
        self._inputs = [(host, host._version) for host in hosts if not host.is_inference()]

    def launch(self) -> None:
        """Start the run; returns when its first microbatch is through.

        Raises:
            BaseException: the first failure, if there was one by then. The call is settled.
        """
        try:
            with Uninterrupted():  # a run that was started is known to its model, no other is
                for call in self.upstream:
                    self.run.scope.follow(call.run.scope)
                self._airborne.flight = self
                self.run.start()
            self.run.wait_first()
        except BaseException as error:
            self._fail(error)
            self._told = True
            raise

    @property
    def may_go_on(self) -> bool:
        """Whether the caller need not wait for the rest."""
        engine, call = self.run.engine, self.call
        if call.config.preserve_rng_state:
            keys = [(r.index, r.module.training, call.keeps_grad) for r in engine.store.layers]
            if not engine.randomness.known_quiet(keys):
                # A worker that has seeded the process's CPU generator for a layer would hand its
                # numbers to the caller, and take back what the caller drew.
                return False
        return not _holds_parts(call.chains[0].borders[len(engine.store.layers)].structure)

    def settle(self, merge: Callable[[], Any] | None = None) -> Any:
        """Wait until the devices are done, and let the call take effect.

        Args:
            merge: what may still fail before it takes effect.

        Returns:
            What ``merge`` returned.

        Raises:
            BaseException: what it failed with, the same object each time.
            StateError: it was interrupted before.
        """
        if not self.settled:
            try:
                for call in self.upstream:
                    call.settle()
                self.run.wait()
                return self._take_effect(merge or self._check_structures)
            except BaseException as error:
                self._fail(error)
                self._told = True
                raise
        if self._error is not None:
            self._told = True
            if not isinstance(self._error, Exception):
                raise StateError(
                    f"the call of {self.run.engine.name} that makes these packed data was "
                    "interrupted; call the model again"
                ) from self._error
            raise self._error
        return None

    def settle_untold(self) -> None:
        """Settle, for the model's next use: a failure that was raised already is over."""
        if not (self.settled and self._told):
            self.settle()

    def settle_quietly(self) -> None:
        """Settle without raising what it failed with: the caller is told, or is gone."""
        with contextlib.suppress(Exception):
            self.settle()

    def settle_after(self, error: BaseException) -> None:
        """Settle because a call that got its outputs failed with ``error``, soon to be raised.

        If it is this call's own failure, all notes are on it then. A Ctrl-C ends this call, too.
        """
        if not self.settled and not isinstance(error, Exception):
            self.run.end(error)
        told = self._told
        try:
            self.settle()
        except BaseException as own:
            if own is not error:
                self._told = told
                if not isinstance(own, Exception):
                    raise  # another Ctrl-C

    def wait_over(self) -> None:
        """Until the devices are done with it; it does not settle yet."""
        with contextlib.suppress(Exception):
            self.run.wait()

    def abandon(self, stepper: Stepper) -> None:
        """Its model is closed or collected."""
        workers = self.run.engine.pool.workers
        if stepper.on_own_thread() or any(worker.is_current() for worker in workers):
            return  # a garbage collection on a thread that the run itself may need
        told = self._told
        self.settle_quietly()
        if self._error is not None and not told:
            logger.error(
                "a call of %s that left its outputs packed failed, and nothing was done afterwards "
                "that could raise the error", self.run.engine.name, exc_info=self._error,
            )  # fmt: skip

    def _take_effect(self, merge: Callable[[], Any]) -> Any:
        layers = self.run.engine.store.layers
        _take_sources(self.call)
        wait_homecoming(self.call, len(layers), self.run.engine.name)
        for host, version in self._inputs:
            if host._version != version:
                raise StateError(
                    f"an input of {self.run.engine.name} was modified in place while the call was "
                    "in flight, so that it may have computed with either value; call synchronize() "
                    "on its packed data before, or modify a copy"
                )
        result = merge()
        commit_buffers(self.call, layers)
        self._finish()
        self._airborne.flight = None
        return result

    def _check_structures(self) -> None:
        num_layers = len(self.run.engine.store.layers)
        structure = self.call.chains[0].borders[num_layers].structure
        for chain in self.call.chains:
            _check_structure(self.run, chain.index, structure)

    def _fail(self, error: BaseException) -> None:
        self.run.end(error)
        for call in self.upstream:
            call.settle_after(error)
        if self.call.keeps_grad and self.run.engine.store.drop_gradients():
            add_where(error, Where(model=self.run.engine.name), DROPPED)
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.settled = True
        self._inputs.clear()
        for chain in self.call.chains:
            chain.entry = None


def _take_sources(call: Call) -> None:
    """What ``call`` waited for are tensors now; those that require grad shall receive gradients."""
    for chain in call.chains:
        if chain.entry is not None:
            chain.sources += chain.entry.sources()
            chain.entry = None  # which holds on to the calls that it waited for


def _check_structure(run: Run, microbatch: int, expected: Structure) -> Border:
    """A microbatch's output.

    Raises:
        InvalidValueError: it has another structure than the first one's.
    """
    border = run.call.chains[microbatch].borders[len(run.engine.store.layers)]
    if border.structure != expected:
        raise InvalidValueError(
            f"{run.engine.name} returned {border.structure.describe()} for microbatch "
            f"{microbatch} and {expected.describe()} for microbatch 0; return the same structure "
            "for every microbatch"
        )
    return border


class PackedOutputs:
    """The outputs of a call in flight, shared by its packed data.

    Args:
        flight: the call.
        bridge: its node in the user's graph, if gradients flow back.
        rows: for each microbatch, the rows it began with; empty if unknown.
    """

    def __init__(
        self, flight: InFlightCall, bridge: Bridge | None, rows: Sequence[int | None]
    ) -> None:
        self._flight = flight
        self._bridge = bridge
        self._rows = rows
        self._num_layers = len(flight.run.engine.store.layers)
        border = flight.call.chains[0].borders[self._num_layers]
        self._structure = border.structure
        self._first = [(leaf.shape, leaf.requires_grad) if isinstance(leaf, Value) else None
                       for leaf in border.leaves]  # fmt: skip
        self._lock = threading.Lock()
        self._handed: dict[int, list[Any]] = {}  # by microbatch
        self._columns: Sequence[Sequence[Any]] | None = None

    def packed(self) -> Any:
        """The tree of packed data."""
        count = len(self._flight.call.chains)
        leaves = range(self._structure.num_leaves)
        packed = [RoundPipePackedData.pending(self, leaf, count) for leaf in leaves]
        return unflatten(self._structure, packed)

    # --- what packed data ask for ------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the call is over and has taken effect, or failed."""
        return self._flight.settled

    def requires_grad(self, leaf: int) -> bool:
        """Whether gradients may flow back through the leaf."""
        return self._bridge is not None and self._first[leaf] is not None

    def expected_rows(self, leaf: int) -> Sequence[int] | None:
        """As the first microbatch has it: so many rows for each that went in."""
        first, rows = self._first[leaf], [size for size in self._rows if size]
        shape = () if first is None else first[0]
        if not shape:
            return ()
        if len(rows) < len(self._rows) or not rows or shape[0] % rows[0]:
            return None
        return [size * shape[0] // rows[0] for size in rows]

    def column(self, leaf: int) -> Sequence[Any]:
        """A leaf's values, complete; waits for the call and raises what it failed with."""
        self._flight.settle()
        if self._columns is None:
            for microbatch in range(len(self._flight.call.chains)):
                self._hand(microbatch)
            # The graph is made when it is first needed, which may be under no_grad.
            keeps_grad = self._flight.call.keeps_grad
            inference = torch.is_inference_mode_enabled() and not keeps_grad
            with torch.inference_mode(inference), torch.set_grad_enabled(keeps_grad):
                trees = outputs_of(self._flight.call, self._num_layers, self._bridge)
            self._columns, _ = columns_from_trees(trees, "output")
        return self._columns[leaf]

    def piece(self, leaf: int, microbatch: int, rows: int | None) -> Arrival:
        """What stands for one value in another call."""
        return _Piece(self, leaf, microbatch, rows)

    # --- what pieces ask for -----------------------------------------------------------------

    @property
    def flight(self) -> InFlightCall:
        """The call."""
        return self._flight

    def hand(self, leaf: int, microbatch: int) -> Any:
        """A leaf of a microbatch that has left the last stage: a value if it is a tensor."""
        return self._hand(microbatch)[leaf]

    def _hand(self, microbatch: int) -> list[Any]:
        # By workers of other calls and, before the values are dropped, by the caller.
        with self._lock:
            if microbatch not in self._handed:
                border = _check_structure(self._flight.run, microbatch, self._structure)
                twins = {id(value): value.twin() for value in border.values()}
                self._handed[microbatch] = [twins.get(id(x), x) for x in border.leaves]
            return self._handed[microbatch]


class _Piece(Arrival):
    def __init__(
        self, outputs: PackedOutputs, leaf: int, microbatch: int, rows: int | None
    ) -> None:
        self._outputs = outputs
        self._leaf = leaf
        self._microbatch = microbatch
        self._rows = rows

    @property
    def may_require_grad(self) -> bool:
        return self._outputs.requires_grad(self._leaf)

    @property
    def call(self) -> InFlightCall:
        return self._outputs.flight

    def wait(self, who: str, scope: Scope) -> None:
        run = self._outputs.flight.run
        run.progress[self._microbatch].wait(run.tasks[-1].position + 1, who, scope)
        scope.check()

    def take(self, pool: DevicePool) -> Any:
        try:
            value = self._outputs.hand(self._leaf, self._microbatch)
        except InvalidValueError as error:
            self._outputs.flight.run.scope.fail(error)  # it is that call which has failed
            raise
        if not isinstance(value, Value):
            return value
        engine = self._outputs.flight.run.engine
        if engine.pool is not pool:
            # Their streams may be of different kinds, which cannot wait for each other.
            try:
                value.home()
            except BaseException as error:
                stage, device = value.origin or (None, None)
                place = Where(engine.name, None, stage, self._microbatch, "download", device)
                add_where(error, place)
                self._outputs.flight.run.scope.fail(error)
                raise
        if self._rows is not None and value.shape is not None and value.shape[0] != self._rows:
            raise InvalidValueError(
                f"packed data of {engine.name} were still in flight, and microbatch "
                f"{self._microbatch} has {value.shape[0]} rows where other arguments or labels "
                f"were cut for {self._rows}, as microbatch 0 made expect; call synchronize() on "
                "the packed data before you pass them"
            )
        return value

    def tensor(self) -> Any:
        return self._outputs.column(self._leaf)[self._microbatch]


def upstream_of(call: Call) -> list[InFlightCall]:
    """The calls whose outputs ``call`` waits for, each once."""
    entries = [chain.entry for chain in call.chains if chain.entry is not None]
    found = {id(a.call): a.call for entry in entries for a in entry.arrivals}
    return list(found.values())


@contextlib.contextmanager
def fed_by(call: Call, scope: Scope) -> Iterator[None]:
    """Around the run of ``call``: it ends with the calls it waits for, and they with it."""
    upstream = upstream_of(call)
    for flight in upstream:
        scope.follow(flight.run.scope)
    try:
        yield
        for flight in upstream:
            flight.settle()
        _take_sources(call)
    except BaseException as error:
        for flight in upstream:
            flight.settle_after(error)
        raise


def _holds_parts(structure: Structure) -> bool:
    if structure.kind is None:
        return False
    return is_made_of_tensors(structure.kind.cls) or any(
        _holds_parts(child) for child in structure.children
    )


class Airborne:
    """The call of one model that is in flight, if there is one."""

    def __init__(self) -> None:
        self.flight: InFlightCall | None = None

    def settle(self) -> None:
        """Before anything else is done with the model.

        Raises:
            BaseException: what the call failed with, unless somebody was told already.
        """
        flight = self.flight
        if flight is not None:
            try:
                flight.settle_untold()
            finally:
                self.flight = None

    def wait(self) -> None:
        """Until the devices no longer use the model."""
        if self.flight is not None:
            self.flight.wait_over()

    def abandon(self, stepper: Stepper) -> None:
        """The model is closed or collected."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.abandon(stepper)
