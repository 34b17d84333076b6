"""Random numbers that depend on (call, microbatch, layer), not on device, thread or plan.

Before a layer runs, the generators it may draw from are seeded. The device's own generator belongs
to one worker. The process's CPU generator is shared by all threads: a layer that draws from it must
not run beside another one that does, nor beside the user's own draws. Which layers those are is
learned: the first run of a layer is watched, and only layers that drew are serialised later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

from .compat import compiled_graphs, watch_random_operators
from .trace import logger

_MASK = (1 << 64) - 1

# Guards torch.default_generator, which is one per process, so it is one per process, too.
_DEFAULT_GENERATOR_LOCK = threading.Lock()

BACKWARD = 0x5851F42D4C957F2D  # tells the seeds of backward from those of forward

LayerKey = tuple[int, bool, bool]  # (layer, training, gradients enabled)


def layer_seed(call_seed: int, microbatch: int, layer: int) -> int:
    """A seed for one layer on one microbatch: the splitmix64 finaliser over the three numbers."""
    mixed = call_seed & _MASK
    for number in (microbatch + 1, layer + 1):
        mixed = (mixed + number * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1  # generators of some devices take 63 bits


def draw_call_seed() -> int:
    """One number of the caller's generator: ``torch.manual_seed`` decides it."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu").item())


class LayerRandomness:
    """What is known about the layers of one model, and the seeded running of one."""

    def __init__(self) -> None:
        self._quiet: set[Hashable] = set()
        self._drawing: set[Hashable] = set()

    def forget(self) -> None:
        """Watch every layer anew."""
        self._quiet.clear()

    def run(
        self, layer: LayerKey, seed: int, function: Callable[[], Any], variant: object = None
    ) -> Any:
        """Call ``function`` with the CPU generator seeded, if it draws from it.

        Args:
            layer: who runs, and in which modes.
            seed: for the generator.
            function: runs it.
            variant: another variant is watched anew. A compiler saves the generator's state before
                it compiles and puts it back afterwards; unwatched, it would put back what another
                thread's layer was about to draw from.
        """
        key: Hashable = layer if variant is None else (layer, variant)
        if key in self._quiet:
            return function()
        # Another thread's layer between seeding and drawing would take this layer's numbers.
        with _DEFAULT_GENERATOR_LOCK:
            # Found to be quiet while this thread waited: then it must not touch the generator any
            # more, which the caller may be using (see `known_quiet`).
            if key not in self._quiet:
                return self._run_seeded(key, seed, function)
        return function()

    def _run_seeded(self, key: Hashable, seed: int, function: Callable[[], Any]) -> Any:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            if key in self._drawing:
                return function()
            seeded = generator.get_state()
            result = function()
            drew = not torch.equal(seeded, generator.get_state())
            (self._drawing if drew else self._quiet).add(key)
            return result
        finally:
            generator.set_state(before)

    def may_draw(self, layers: tuple[LayerKey, ...]) -> bool:
        """Whether backward through the layers draws, or has not been watched yet."""
        return layers not in self._quiet

    def run_backward(self, layers: tuple[LayerKey, ...], function: Callable[[bool], None]) -> None:
        """Run a backward through ``layers``, alone if it draws from the CPU generator.

        A layer that runs again within backward (``torch.utils.checkpoint``) sets the generator to
        where its forward began, draws, and sets it back: its state tells nothing. So operators are
        watched, the first time.

        Args:
            layers: the layers it goes through.
            function: runs it; told whether it draws, or may.
        """
        if layers in self._quiet:
            function(False)
            return
        with _DEFAULT_GENERATOR_LOCK:
            generator = torch.default_generator
            before = generator.get_state()
            try:
                if layers in self._drawing:
                    function(True)
                    return
                with watch_random_operators() as drawing:
                    function(True)
                if drawing:
                    self._drawing.add(layers)
                    # The caller must not draw beside them (see `known_quiet`).
                    self._quiet.difference_update(layers)
                else:
                    self._quiet.add(layers)
            finally:
                generator.set_state(before)

    def known_quiet(self, keys: Iterable[LayerKey]) -> bool:
        """Whether none of the layers touches the CPU generator: the caller may draw beside them."""
        return all(key in self._quiet for key in keys)

    @contextlib.contextmanager
    def watch_call(self, model_name: str) -> Iterator[None]:
        """Entered around a run: notice a layer that drew although it never had before."""
        before, compiled = torch.default_generator.get_state(), compiled_graphs()
        yield
        if not torch.equal(before, torch.default_generator.get_state()):
            self.forget()
            torch.default_generator.set_state(before)
            if compiled != compiled_graphs():
                return  # it was the compiler, which saves and restores the generator's state
            logger.warning(
                "a layer of %s drew random numbers for the first time since it was last watched; "
                "in this call they depend on timing. Call model.train() or model.eval() after "
                "changing what a layer does, so that layers are watched anew",
                model_name,
            )
