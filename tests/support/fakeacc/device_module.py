"""What torch looks for in `torch.fakeacc`: the module of the device type."""

import os
from types import ModuleType

import torch

from .native import Native

DEVICE_TYPE = "fakeacc"

Device = int | str | torch.device | None


class DeviceModule(ModuleType):
    """The functions that torch, its checkpointing and its random state expect of a device type.

    torch.accelerator asks some of them, so they must not ask torch.accelerator back.
    """

    def __init__(self, native: Native) -> None:
        super().__init__(f"torch.{DEVICE_TYPE}")
        self.native = native
        self._process = os.getpid()
        self._initialized = True

    def device_count(self) -> int:
        return self.native.device_count()

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return os.getpid() != self._process  # the child has no threads for the streams

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: int | str | torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Device) -> torch.accelerator.device_index:
        """A context with another current device; as it was with `None`."""
        return torch.accelerator.device_index(None if device is None else self._index(device))

    def synchronize(self, device: Device = None) -> None:
        torch.accelerator.synchronize(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: int | str | torch.device = DEVICE_TYPE) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(
        self, new_state: torch.Tensor, device: int | str | torch.device = DEVICE_TYPE
    ) -> None:
        self._generator(device).set_state(new_state)

    def manual_seed(self, seed: int) -> None:
        self._generator(DEVICE_TYPE).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def _generator(self, device: int | str | torch.device) -> torch.Generator:
        return self.native.default_generator(self._index(device))

    def _index(self, device: int | str | torch.device) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index
