"""What a wrapped model tells about its speed: costs, traces, profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from os import PathLike

from torch import nn

from .costs import ModelCosts, PlanBook
from .dispatch import Engine
from .errors import StateError
from .facade import WrappedModel
from .plan import LayerCosts, Machine, ModelExecutePlan
from .plan.stage_plan import check_run_type
from .plan.workload import check_count
from .profile import Profile
from .stepping import Stepper
from .trace import EventLog


class MeasuredModel(WrappedModel):
    """Measures while it runs, always, and shows it when asked.

    Args:
        model: the model whose layers run.
        engine: what its runs share.
        stepper: its optimizer thread.
        book: its costs and plans.
    """

    def __init__(self, model: nn.Module, engine: Engine, stepper: Stepper, book: PlanBook) -> None:
        super().__init__(model, engine.name, engine.store)
        self.__dict__.update(_engine=engine, _stepper=stepper, _book=book)
        engine.log.listen(book.meter.hear)

    # --- costs -------------------------------------------------------------------------------

    def costs(self) -> ModelCosts:
        """What each layer costs for one microbatch; ``print`` it for a table.

        Measured as soon as every layer has run twice, forward; until then loaded or estimated from
        sizes, which ``source`` says. Times are medians: over the microbatches of a call, and over
        the latest calls. A layer's first microbatch is dropped.
        """
        book: PlanBook = self._book
        return book.costs()

    def load_costs(self, costs: ModelCosts | str | PathLike[str]) -> None:
        """Plan with the costs of an earlier run until there are measurements of this one.

        Args:
            costs: from :meth:`costs`, or the file that ``costs().save(path)`` wrote.

        Raises:
            InvalidValueError: costs of another model or kind of device, or no costs file.
            OSError: the file cannot be read.
        """
        if not isinstance(costs, ModelCosts):
            costs = ModelCosts.load(costs)
        self._book.load(costs)

    def plan_costs(self) -> LayerCosts:
        """What the layers cost, for :meth:`ModelExecutePlan.auto`; see :meth:`costs`."""
        return self.costs().layers

    def plan_machine(self) -> Machine:
        """The devices and what was seen of their transfers, for :meth:`ModelExecutePlan.auto`."""
        return self.costs().machine

    def current_plan(self, run_type: str, num_microbatch: int) -> ModelExecutePlan:
        """The plan of the next call of this kind for which none is given.

        Args:
            run_type: ``"infer"``, ``"train"`` or ``"fused"``.
            num_microbatch: microbatches of the call.
        """
        check_run_type(run_type)
        check_count("num_microbatch", num_microbatch)
        book: PlanBook = self._book
        return book.plan(run_type, num_microbatch)

    # --- what ran when -----------------------------------------------------------------------

    @property
    def event_log(self) -> EventLog:
        """The latest spans of this model's calls, for pictures and benchmarks."""
        log: EventLog = self._engine.log
        return log

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write what is in the event log as a trace file for https://ui.perfetto.dev.

        Raises:
            StateError: the model has not run yet.
        """
        spans = list(self.event_log)
        if not spans:
            raise StateError(
                f"the model {self.name} has not run yet; call it before its trace is saved"
            )
        profile = Profile(self._device_names, self.name)
        profile.close(spans)
        profile.save_trace(path)

    @contextlib.contextmanager
    def profile(self) -> Iterator[Profile]:
        """Within it, what runs is recorded; afterwards the profile that it gives can be read.

        ::

            with model.profile() as profile:
                for batch in batches:
                    model.forward_backward(...)
                    model.step(update)
            print(profile.account().bubble_percent)
            profile.save_picture("timeline.png")
        """
        profile = Profile(self._device_names, self.name)
        stepper: Stepper = self._stepper
        with self.event_log.recording() as spans:
            yield profile
            stepper.settle()
        profile.close(spans)

    @property
    def _device_names(self) -> list[str]:
        return [device.name for device in self._engine.pool.devices]
