"""What stands in the module tree where parts were taken out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from roundpipe.calls import Call
from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.tree import flatten
from roundpipe.pipeline import RoundPipe
from roundpipe.stepping import Stepper
from roundpipe.wrapping.group_store import GroupStore


class Part(RoundPipe):
    """A RoundPipe that is stepped together with others."""

    def follow(self, stepper: Stepper, group: GroupStore) -> None:
        """Become one of a group.

        Args:
            stepper: says whether a step has failed, or is running on this thread.
            group: what to drop gradients of after a failure.
        """
        self.__dict__.update(_stepper=stepper, _group=group)
        # What reaches a part need not have the batch's rows, and nobody chose the number for it.
        self._warned.add("fewer rows")

    @contextlib.contextmanager
    def _effects(self, call: Call) -> Iterator[None]:
        try:
            with super()._effects(call):
                yield
        except BaseException:
            if call.keeps_grad:
                self._group.drop_gradients()
            raise

    def watch_anew(self) -> None:
        """Other layers than before may draw random numbers."""
        self._engine.randomness.forget()


class Current:
    """What all parts look up during a call.

    Attributes:
        config: the options of the call.
        wait: waits until all parameters may be read in host memory.
    """

    def __init__(self) -> None:
        self.config = RoundPipeRunConfig()
        self.wait: Callable[[], None] = lambda: None


class StandIn(nn.Module):
    """In place of a module; everything but calling it is done on the original, in host memory.

    Args:
        original: what it stands for.
        current: what is looked up during a call.
    """

    def __init__(self, original: nn.Module, current: Current) -> None:
        super().__init__()
        self.__dict__.update(_original=original, _current=current)  # the original is no submodule

    def follow_mode(self) -> None:
        """Take over the original's training flag."""
        self.training = self.__dict__["_original"].training

    def __getattr__(self, name: str) -> Any:
        return self._waited_for(getattr(self.__dict__["_original"], name))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waited_for(self.__dict__["_original"]))

    def __len__(self) -> int:
        return len(self.__dict__["_original"])

    def __getitem__(self, index: Any) -> Any:
        return self._waited_for(self.__dict__["_original"])[index]

    def _waited_for(self, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.Tensor):
            # A step may still be writing what is now going to be read in host memory.
            self.__dict__["_current"].wait()
        return value


class PartCall(StandIn):
    """Calls a part.

    Args:
        original: what it stands for.
        current: what is looked up during a call.
        pipe: the part.
    """

    def __init__(self, original: nn.Module, current: Current, pipe: Part) -> None:
        super().__init__(original, current)
        self.__dict__["_pipe"] = pipe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part on the devices."""
        return self.call(args, kwargs, packed=False)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], packed: bool) -> Any:
        """Run the part.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            packed: whether to leave the output in microbatches, for the next part.
        """
        self._refuse_cache(args, kwargs)
        config = self.__dict__["_current"].config
        if packed:
            config = replace(config, merge_output=False)
        return self.__dict__["_pipe"].forward(*args, roundpipe_run_config=config, **kwargs)

    def _refuse_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pipe: Part = self.__dict__["_pipe"]
        if "transformers" not in sys.modules or pipe.model_run_config.num_microbatch == 1:
            return
        from roundpipe.hf.private import is_cache

        if any(is_cache(leaf) for leaf in flatten((args, kwargs))[0]):
            raise InvalidValueError(
                f"{pipe.name} is given a cache, which all microbatches would fill at once; pass "
                "use_cache=False, or num_microbatch=1 in the model's run config"
            )

    def hands_on_to(self, other: PartCall) -> bool:
        """Whether the other part can take the output in microbatches, as they are."""
        mine, theirs = self._own_config, other._own_config
        return (
            mine.merge_output is None
            and theirs.split_input is None
            and mine.num_microbatch == theirs.num_microbatch
        )

    @property
    def _own_config(self) -> RoundPipeRunConfig:
        config: RoundPipeRunConfig = self.__dict__["_pipe"].model_run_config
        return config


class Chain(StandIn):
    """In place of a ``nn.Sequential``; parts that follow each other exchange microbatches.

    Args:
        original: what it stands for.
        current: what is looked up during a call.
        items: what is called, in order.
    """

    def __init__(self, original: nn.Module, current: Current, items: list[nn.Module]) -> None:
        super().__init__(original, current)
        self.__dict__["_items"] = tuple(items)

    def forward(self, value: Any) -> Any:
        """Call the items, each on what the one before returned."""
        items = self.__dict__["_items"]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if isinstance(item, PartCall):
                packed = isinstance(following, PartCall) and item.hands_on_to(following)
                value = item.call((value,), {}, packed)
            else:
                value = item(value)
        return value


def merged_config(own: RoundPipeRunConfig | None, common: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """Options of a part: its own, and where it has none those of the whole model."""
    if own is None:
        return common
    given = {f.name: getattr(own, f.name) for f in fields(own) if getattr(own, f.name) is not None}
    return replace(common, **given)
