"""Good plans to start from: even stages, as many as asked for."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from roundpipe.plan.cost_tables import BACKWARD, FORWARD, FUSED
from roundpipe.plan.partition import balanced_stages, fitted_stages
from roundpipe.plan.space import Cut, PlanSpace


class SeedMaker:
    """Makes plans of even stages that keep to the limits on single stages.

    Args:
        space: the plans there are.
    """

    def __init__(self, space: PlanSpace) -> None:
        self._space = space
        self._even = lru_cache(maxsize=None)(self._even_bounds)
        self._fewest = lru_cache(maxsize=None)(self._fewest_stages)
        self._balanced = lru_cache(maxsize=None)(self._balanced_bounds)

    def cut(
        self, forward: int, backward: int, width: int, per_round: int, falling: bool = False
    ) -> Cut:
        """A plan with about as many forward and backward stages as asked for.

        Args:
            forward: number of forward stages.
            backward: number of backward stages, the fused one among them.
            width: replicas of the stages of heavy layers.
            per_round: microbatches in a round.
            falling: put the longer forward stages first. They then follow the last iteration's
                backward stages, which are long, too; otherwise the pipeline fills sooner.
        """
        space = self._space
        bounds: tuple[int, ...] = ()
        top = space.layers
        if space.has_backward:
            bounds = self._backward_bounds(backward, width)
            if space.is_fused:
                top = bounds[-2]
        widths = (width,) * (2 * len(space.heavy))
        ahead = self._even(FORWARD, top, forward, width, falling)
        return Cut(ahead, bounds, widths, per_round)

    def fitted_cut(self, forward: int, backward: int, width: int, per_round: int) -> Cut | None:
        """A plan whose stages are as long as the devices they come to are fast.

        It assumes that every iteration begins at the first device, which is so if stages and
        replicas of an iteration are a multiple of the devices.

        Args:
            forward: number of forward stages.
            backward: number of backward stages, the fused one among them.
            width: replicas of the stages of heavy layers.
            per_round: microbatches in a round.

        Returns:
            The plan, or None if there are not enough layers.
        """
        space = self._space
        speeds, devices = space.speeds, len(space.speeds)
        top = space.layers
        bounds: tuple[int, ...] = ()
        if space.has_backward:
            wide = width if space.is_fused and top - 1 in space.heavy else 1
            places = [forward, *range(forward + wide, forward + wide + backward - 1)]
            if backward > top:
                return None
            costs = self._costs(BACKWARD, top, width)[::-1]
            fused = 0
            if space.is_fused and (wide > 1 or not space.stage_is_lean(FUSED, top - 2, top)):
                fused = 1
            if backward - fused > top - fused or backward <= fused:
                return None
            stages = fitted_stages(costs[fused:], [speeds[p % devices] for p in places[fused:]])
            down = [top - fused - stage.stop for stage in stages]
            bounds = (*reversed(down), *((top - 1,) if fused else ()), top)
            if space.is_fused:
                top = bounds[-2]
        if forward > top:
            return None
        stages = fitted_stages(
            self._costs(FORWARD, top, width), [speeds[p % devices] for p in range(forward)]
        )
        ahead = (0, *(stage.stop for stage in stages))
        return Cut(ahead, bounds, (width,) * (2 * len(space.heavy)), per_round)

    def _backward_bounds(self, count: int, width: int) -> tuple[int, ...]:
        space = self._space
        if not space.is_fused:
            return self._even(BACKWARD, space.layers, count, width)
        start = self._even(BACKWARD, space.layers, count, width)[-2]
        while start < space.layers - 1 and not space.stage_is_lean(FUSED, start, space.layers):
            start += 1
        if start == 0:
            return (0, space.layers)
        return (*self._even(BACKWARD, start, count - 1, width), space.layers)

    def _even_bounds(
        self, phase: int, top: int, count: int, width: int, falling: bool = False
    ) -> tuple[int, ...]:
        """Bounds of ``count`` even stages of the layers below ``top``; of more if limits ask."""
        if top == 0:
            return (0,)
        count = max(count, self._fewest(phase, top))
        for number in range(count, min(count + 4, top) + 1):
            stages = self._balanced(phase, top, number, width, falling)
            if all(self._space.stage_is_lean(phase, a, b) for a, b in pairwise(stages)):
                return stages
        bounds = [0]
        for start, stop in pairwise(self._balanced(phase, top, count, width, falling)):
            bounds += self._split(phase, start, stop)
        return tuple(bounds)

    def _fewest_stages(self, phase: int, top: int) -> int:
        """How many stages the layers below ``top`` need, if each takes as many as it may."""
        count, start = 0, 0
        while start < top:
            stop = start + 1
            while stop < top and self._space.stage_is_lean(phase, start, stop + 1):
                stop += 1
            count, start = count + 1, stop
        return count

    def _balanced_bounds(
        self, phase: int, top: int, count: int, width: int, falling: bool
    ) -> tuple[int, ...]:
        costs = self._costs(phase, top, width)
        if falling:
            stages = balanced_stages(costs[::-1], count)
            return (0, *(top - stage.start for stage in reversed(stages)))
        return (0, *(stage.stop for stage in balanced_stages(costs, count)))

    def _costs(self, phase: int, top: int, width: int) -> list[float]:
        """What the layers below ``top`` take, as seen by the next stage."""
        space = self._space
        costs = [space.stage_ms(phase, layer, layer + 1) for layer in range(top)]
        for layer in space.heavy:
            if layer < top:
                costs[layer] /= width
        return costs

    def _split(self, phase: int, start: int, stop: int) -> list[int]:
        """Ends of the lean stages that a stage is cut into, as few as halving gives."""
        if stop - start == 1 or self._space.stage_is_lean(phase, start, stop):
            return [stop]
        middle = (start + stop) // 2
        return [*self._split(phase, start, middle), *self._split(phase, middle, stop)]
