"""Two models in a row, whose first can be kept at its last microbatch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CheckedPool
from roundpipe.devices.base import Stream
from roundpipe.devices.script import Hold

COUNT = 3
PATIENCE_S = 20.0  # of a helper whose test has failed already
PACKED = RoundPipeRunConfig(merge_output=False)
X = torch.linspace(-1, 1, 14).view(7, 2)


class Layer(nn.Module):
    """Linear; counts its forwards in a buffer, says what came by, and fails when told to."""

    visits: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("visits", torch.zeros(()))
        # Shared with the replicas on devices.
        self.rows: list[int] = []
        self.faults: dict[int, BaseException] = {}  # by number of the forward
        self.arrived = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = len(self.rows)
        self.rows.append(x.shape[0])
        if number in self.faults:
            raise self.faults[number]
        self.visits.add_(1)
        out: torch.Tensor = self.linear(x).tanh()
        self.arrived.set()
        return out

    def twin(self) -> Layer:
        """A layer with the same weights that nobody has used."""
        twin = Layer()
        twin.load_state_dict(self.state_dict())
        return twin


def one_stage(fused: bool = False) -> RoundPipeRunConfig:
    """A model of one layer on one device."""
    plan = ModelExecutePlan([] if fused else [range(1)], [range(1)])
    return RoundPipeRunConfig(num_microbatch=COUNT, execute_plan=plan)


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A squared error."""
    return ((output - label) ** 2).sum()


class Duo:
    """Two models in a row, one stage each, on neighbouring devices or in pools of their own."""

    def __init__(self, first: CheckedPool, second: CheckedPool) -> None:
        torch.manual_seed(0)
        self.pool = first
        self.layers = [Layer(), Layer()]
        front, back = (nn.Sequential(layer) for layer in self.layers)
        self.front = RoundPipe(front, devices=first, name="front", model_run_config=one_stage())
        self.back = RoundPipe(back, devices=second, name="back", model_run_config=one_stage())
        self.overlapped = False

    def plain(self) -> nn.Sequential:
        """Both in one, unused."""
        return nn.Sequential(*(layer.twin() for layer in self.layers))

    def hold_last(self) -> Hold:
        """Keeps the front model's last microbatch on its way to the device, until released."""
        self.pool.cursor = 0
        return self.pool.hold(Stream.INWARD, device=0, after=COUNT - 1)

    @contextlib.contextmanager
    def held_until(self, happened: Callable[[], Any]) -> Iterator[Hold]:
        """The last microbatch is held until a helper has seen ``happened`` return."""
        with self.hold_last() as hold:

            def let_go() -> None:
                happened()
                hold.release()

            helper = threading.Thread(target=let_go)
            helper.start()
            yield hold
            helper.join()

    @contextlib.contextmanager
    def last_microbatch_held(self) -> Iterator[None]:
        """Until the back model has run its first one."""

        def second_model_runs() -> None:
            self.overlapped = self.layers[1].arrived.wait(PATIENCE_S)

        with self.held_until(second_model_runs) as hold:
            yield
        assert hold.is_reached

    def close(self) -> None:
        self.front.close()
        self.back.close()
