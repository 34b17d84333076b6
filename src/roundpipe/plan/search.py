"""Looking for the fastest legal plan: all of them where there are few, else scan and improve.

Effort is counted in simulated stages, not in seconds, so the same workload gives the same plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product

from roundpipe.plan.bounds import least_load_ms
from roundpipe.plan.iterations import Schedule, pace_of
from roundpipe.plan.seeds import SeedMaker
from roundpipe.plan.space import Cut, PlanSpace

_EFFORT_OF_A_PLAN = 10
"""What making and checking a plan costs, in simulated stages."""

_GOOD_ENOUGH = 1 + 5e-4
_HOPELESS = 1.005
_STARTS = 8
_FIRST_SHARE = 15
_TOLERANCE = 0.004
_CHANGES = (1, 1, 1, 1, 2, 2, 3, 5)

_ROUNDING = 1 + 1e-12

Others = tuple[tuple[Schedule, ...], tuple[Schedule, ...]]
"""What other models run in an iteration, before and after the one that is planned."""

Seed = tuple[int, int, int, int, bool]
"""Arguments of ``SeedMaker.cut``."""


class OutOfEffort(Exception):  # noqa: N818 - ends a search, never seen by users
    """The search has spent what it may spend."""


class Search:
    """Compares plans and remembers the best.

    Args:
        space: the plans there are.
        effort: how many stages may be simulated.
        bound_ms: no plan can be faster; a plan nearly this fast ends the search.
        is_thorough: stop for no plan but one at the bound, and give no plan up early.
        others: what other models run in the same iteration.

    Attributes:
        best: the fastest legal plan so far.
        best_ms: its time.
        effort: see above.
        spent: stages simulated, and what comes with them in the same currency.
    """

    def __init__(
        self,
        space: PlanSpace,
        effort: int,
        bound_ms: float,
        *,
        is_thorough: bool = False,
        others: Others = ((), ()),
    ) -> None:
        self.space = space
        self.best: Cut | None = None
        self.best_ms = math.inf
        self.spent = 0
        self.effort = effort
        self._enough_ms = bound_ms * (_ROUNDING if is_thorough else _GOOD_ENOUGH)
        self._hopeless = math.inf if is_thorough else _HOPELESS
        self._others = others
        self._known: dict[Cut, float] = {}

    def time(self, cut: Cut) -> float:
        """Time of an iteration under a plan; infinite if it is not legal.

        For a plan that is clearly slower than the best it may be too low.

        Raises:
            OutOfEffort: nothing more may be spent, or a plan cannot be better than the best.
        """
        known = self._known.get(cut)
        if known is not None:
            return known
        if self.spent > self.effort or self.best_ms <= self._enough_ms:
            raise OutOfEffort
        self.spent += _EFFORT_OF_A_PLAN + (len(cut.forward) + len(cut.backward)) // 4
        result = self._simulated(cut) if self.space.is_legal(cut) else math.inf
        self._known[cut] = result
        if result * _ROUNDING < self.best_ms:
            self.best, self.best_ms = cut, result
        return result

    def _simulated(self, cut: Cut) -> float:
        before, after = self._others
        schedules = (*before, self.space.schedule(cut), *after)
        stages = sum(len(steps) * s.rounds for s in schedules for steps in s.calls)
        least_ms = least_load_ms(self.space.workload, schedules)
        if least_ms > self.best_ms * _HOPELESS:
            return least_ms
        hopeless_ms = self.best_ms * self._hopeless
        pace = pace_of(self.space.workload, schedules, hopeless_ms=hopeless_ms)
        self.spent += pace.iterations * stages
        return pace.iteration_ms

    def fastest(self, count: int) -> list[tuple[float, Cut]]:
        """The fastest plans so far, one for each number of backward stages, with their times."""
        best: dict[int, tuple[float, Cut]] = {}
        for cut, ms in self._known.items():
            stages = len(cut.backward)
            if ms < math.inf and (stages not in best or (ms, cut) < best[stages]):
                best[stages] = ms, cut
        return sorted(best.values())[:count]

    @property
    def tried(self) -> int:
        """How many plans were compared."""
        return sum(ms < math.inf for ms in self._known.values())

    def run(self, *phases: Callable[[Search], None]) -> None:
        """Run phases of a search until they end or the effort does."""
        try:
            for phase in phases:
                phase(self)
        except OutOfEffort:
            return


# --- every plan ------------------------------------------------------------------------------


def count_plans(space: PlanSpace) -> int:
    """How many plans :func:`every_plan` makes."""
    layers = space.layers
    if space.is_fused:
        cuts = 1 + sum(4 ** (start - 1) for start in range(1, layers))
    else:
        cuts = 2 ** (layers - 1) * (2 ** (layers - 1) if space.has_backward else 1)
    rounds = len(space.limits.rounds_of(space.workload.microbatches))
    widths = math.prod(len(choices) for choices in _width_choices(space))
    return int(cuts) * widths * rounds


def every_plan(space: PlanSpace) -> Iterator[Cut]:
    """Every plan, legal or not."""
    rounds = space.limits.rounds_of(space.workload.microbatches)
    widths = list(product(*_width_choices(space)))
    for per_round in rounds:
        for backward in _backward_bounds(space):
            top = backward[-2] if space.is_fused else space.layers
            for forward in _every_bounds(top):
                for width in widths:
                    yield Cut(forward, backward, width, per_round)


def _width_choices(space: PlanSpace) -> list[range]:
    """Replicas of the forward and the backward stage of each heavy layer."""
    choices = []
    for layer in space.heavy:
        # The last layer of a fused run has no forward stage.
        has_forward = not space.is_fused or layer < space.layers - 1
        choices.append(range(1, (space.max_width if has_forward else 1) + 1))
        choices.append(range(1, (space.max_width if space.has_backward else 1) + 1))
    return choices


def _backward_bounds(space: PlanSpace) -> Iterable[tuple[int, ...]]:
    return _every_bounds(space.layers) if space.has_backward else [()]


def _every_bounds(layers: int) -> Iterator[tuple[int, ...]]:
    if layers == 0:
        yield (0,)
        return
    for count in range(layers):
        for inner in combinations(range(1, layers), count):
            yield (0, *inner, layers)


def try_every_plan(search: Search) -> None:
    """Time all plans."""
    for cut in every_plan(search.space):
        search.time(cut)


# --- scan, then improve ----------------------------------------------------------------------


def scan_speeds(search: Search) -> None:
    """Where devices differ: time plans whose stages fit the devices that they always come to."""
    space = search.space
    devices = len(space.speeds)
    if min(space.speeds) == 1:
        return
    make = SeedMaker(space).fitted_cut
    per_round = space.limits.rounds_of(space.workload.microbatches)[0]
    widths = range(1, min(space.max_width, 3) + 1) if space.heavy else (1,)
    most = 2 * space.layers if space.has_backward else space.layers
    for total, width in product(range(devices, most + devices, devices), widths):
        if not space.has_backward:
            _time_some(search, [make(total, 0, width, per_round)])
            continue
        backward_share = space.stage_ms(2, 0, space.layers)
        share = space.stage_ms(0, 0, space.layers)
        even = round(total * share / (share + backward_share)) if share else 1
        numbers = sorted({even + offset for offset in (-3, -2, -1, 0, 1, 2, 3)} | {total // 2})
        _time_some(
            search,
            [
                make(number, total - number - width + 1, width, per_round)
                for number in numbers
                if 0 < number <= total - width
            ],
        )


def _time_some(search: Search, cuts: Iterable[Cut | None]) -> None:
    for cut in cuts:
        if cut is not None:
            search.time(cut)


def scan(search: Search) -> None:
    """Time plans of even stages: numbers of stages that match, then one number at a time."""
    space = search.space
    make = SeedMaker(space).cut
    rounds = space.limits.rounds_of(space.workload.microbatches)
    orders = (False,) if space.workload.mode == "sync" else (False, True)
    timed: dict[Seed, float] = {}

    def best_of(seeds: Iterable[Seed], keep: int) -> list[Seed]:
        for seed in seeds:
            if seed not in timed:
                timed[seed] = search.time(make(*seed))
        return sorted(timed, key=lambda seed: (timed[seed], seed))[:keep]

    most = space.layers
    widths = range(1, space.max_width + 1) if space.heavy else (1,)
    best = best_of(_matching(space, rounds[0], orders), 3)
    if not space.has_backward:
        best_of(
            ((n, 0, 1, r, o) for n in range(1, most + 1) for r in rounds[:3] for o in orders), 1
        )
        return
    for _ in range(2):
        (_, backward, _, per_round, _), *_ = best
        near = (
            (n, backward, w, per_round, o) for w in widths for n in _counts(most) for o in orders
        )
        best = best_of(near, 3)
        near = (
            (f, n, w, r, o) for f, b, w, r, o in best for n in range(b - 4, b + 5) if 0 < n <= most
        )
        best = best_of(near, 3)
    best_of(((f, b, w, r, o) for f, b, w, _, o in best for r in rounds[:3]), 1)


def _matching(space: PlanSpace, per_round: int, orders: Sequence[bool]) -> Iterator[Seed]:
    """Forward and backward stages of about the same time, and heavy ones as wide as that needs."""
    layers = space.layers
    forward = space.stage_ms(0, 0, layers)
    backward = space.stage_ms(2, 0, layers)
    for size in range(1, min(4, layers) + 1):
        count = -(-layers // size)
        stage_ms = backward / count if space.has_backward else forward / count
        heaviest = max((space.stage_ms(1, h, h + 1) for h in space.heavy), default=0.0)
        wanted = heaviest / stage_ms if stage_ms else 1.0
        widths = {min(max(round(wanted) + n, 1), space.max_width) for n in (0, 1)}
        matching = round(forward / stage_ms) if stage_ms else 1
        numbers = [n for n in range(matching - 2, matching + 3) if 0 < n <= layers]
        for width, number, order in product(
            sorted(widths if space.heavy else {1}), numbers, orders
        ):
            yield number, count, width, per_round, order


def _counts(most: int) -> list[int]:
    """Numbers of stages that are worth a try: those near one to four layers in each."""
    near = {most // size + offset for size in (1, 2, 3, 4) for offset in range(-8, 9)}
    return sorted(number for number in near if 0 < number <= most)


def improve(search: Search) -> None:
    """Change good plans a little, again and again; keep what is not worse, drop the laggards.

    The fastest plan so far is not always the one that can be improved most, so several that differ
    in their number of backward stages are changed in turn, and the slower half is given up
    whenever each has had its share of changes.
    """
    chance = random.Random(0)
    current = search.fastest(_STARTS)
    share, tolerance = _FIRST_SHARE, _TOLERANCE
    while current and search.spent <= search.effort:
        for _ in range(share):
            search.spent += len(current)
            current = [_changed_or_not(search, ms, cut, chance, tolerance) for ms, cut in current]
        current = sorted(current)[: (len(current) + 1) // 2]
        share, tolerance = 2 * share, tolerance / 2


def _changed_or_not(
    search: Search, ms: float, cut: Cut, chance: random.Random, tolerance: float
) -> tuple[float, Cut]:
    """A plan that differs in a few places, unless it is much worse."""
    changed = cut
    for _ in range(chance.choice(_CHANGES)):
        changed = _changed(search.space, changed, chance) or changed
    if changed == cut:
        return ms, cut
    changed_ms = search.time(changed)
    return (changed_ms, changed) if changed_ms <= ms * (1 + tolerance) else (ms, cut)


def _changed(space: PlanSpace, cut: Cut, chance: random.Random) -> Cut | None:
    """A neighbour of a plan, or None if the draw gives none."""
    if cut.widths and chance.random() < 0.1:
        place = chance.randrange(len(cut.widths))
        width = cut.widths[place] + chance.choice((-1, 1))
        if not 1 <= width <= space.max_width:
            return None
        return cut._replace(widths=(*cut.widths[:place], width, *cut.widths[place + 1 :]))
    if space.is_fused and chance.random() < 0.05:
        return _moved_fused_start(cut, chance.choice((-1, 1)))
    if space.has_backward and chance.random() < 0.5:
        # The start of the fused stage is the end of the forward ones: not to be moved alone.
        fixed = 2 if space.is_fused else 1
        bounds = _changed_bounds(cut.backward[: len(cut.backward) - fixed + 1], chance)
        tail = cut.backward[len(cut.backward) - fixed + 1 :]
        return None if bounds is None else cut._replace(backward=(*bounds, *tail))
    bounds = _changed_bounds(cut.forward, chance)
    return None if bounds is None else cut._replace(forward=bounds)


def _moved_fused_start(cut: Cut, shift: int) -> Cut | None:
    start = cut.backward[-2] + shift
    forward, backward = cut.forward[:-1], cut.backward[:-2]
    if not forward or not backward or start >= cut.backward[-1]:
        return None
    if start <= max(forward[-1], backward[-1]):
        return None
    return cut._replace(forward=(*forward, start), backward=(*backward, start, cut.backward[-1]))


def _changed_bounds(bounds: tuple[int, ...], chance: random.Random) -> tuple[int, ...] | None:
    """Move a layer from one stage to another, merge two stages, or cut one in two."""
    inner = len(bounds) - 2
    draw = chance.random()
    if draw < 0.7:
        if inner < 1:
            return None
        first, last = sorted((chance.randint(1, inner), chance.randint(1, inner)))
        if chance.random() < 0.3:
            last = first
        shift = chance.choice((-1, 1))
        moved = tuple(bound + shift for bound in bounds[first : last + 1])
        if moved[0] <= bounds[first - 1] or moved[-1] >= bounds[last + 1]:
            return None
        return (*bounds[:first], *moved, *bounds[last + 1 :])
    if draw < 0.85:
        if inner < 1:
            return None
        place = chance.randint(1, inner)
        return (*bounds[:place], *bounds[place + 1 :])
    if bounds[-1] < 2:
        return None
    new = chance.randrange(1, bounds[-1])
    return None if new in bounds else tuple(sorted((*bounds, new)))
