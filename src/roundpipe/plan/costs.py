"""What layers cost and what devices can do, as numbers: the planner's and the simulator's input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from roundpipe.errors import InvalidTypeError, InvalidValueError


@dataclass(frozen=True)
class LayerCost:
    """One layer, for one microbatch.

    Attributes:
        forward_ms: forward.
        backward_ms: backward, without the recompute.
        recompute_ms: forward again, keeping what backward needs; ``forward_ms`` unless given.
        weight_bytes: uploaded whenever a stage with this layer runs.
        gradient_bytes: downloaded after a backward stage with this layer.
        saved_input_bytes: kept in host memory for each microbatch when a backward stage begins
            with this layer.
        forward_bytes: device memory that the running forward needs besides weights.
        activation_bytes: device memory held between recompute and backward.
        optimizer_ms: updating the layer's parameters, once an iteration.

    Raises:
        InvalidValueError: a negative or infinite number, or one that is not a number.
    """

    forward_ms: float
    backward_ms: float = 0.0
    recompute_ms: float | None = None
    weight_bytes: int = 0
    gradient_bytes: int = 0
    saved_input_bytes: int = 0
    forward_bytes: int = 0
    activation_bytes: int = 0
    optimizer_ms: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (item.name == "recompute_ms" and value is None):
                _check_amount(f"LayerCost.{item.name}", value)

    @property
    def again_ms(self) -> float:
        """Time of the recompute."""
        return self.forward_ms if self.recompute_ms is None else self.recompute_ms


@dataclass(frozen=True)
class LayerCosts:
    """All layers of one model, in order.

    Attributes:
        layers: one record per layer.
        name: shown in explanations.
    """

    layers: tuple[LayerCost, ...]
    name: str = "model"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise InvalidValueError("LayerCosts got no layers; expected at least one")

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_measured(self) -> bool:
        """Whether there are times; without them only sizes are known."""
        return any(layer.forward_ms > 0 or layer.backward_ms > 0 for layer in self.layers)

    @classmethod
    def uniform(
        cls, layers: int, forward_ms: float, backward_ms: float, *tail: LayerCost, name: str = ""
    ) -> LayerCosts:
        """``layers`` equal layers, then ``tail`` (usually the head)."""
        body = [LayerCost(forward_ms, backward_ms)] * layers
        return cls((*body, *tail), name or "model")

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> LayerCosts:
        """Read what :meth:`to_document` wrote, as from a JSON file.

        Raises:
            InvalidTypeError: an entry of the wrong type.
            InvalidValueError: a name that is not known, or an impossible number.
        """
        layers = document.get("layers")
        if not isinstance(layers, Sequence) or isinstance(layers, str):
            raise InvalidTypeError(
                f"a costs document needs a list 'layers'; got {type(layers).__name__}"
            )
        return cls(
            tuple(_layer_from(entry, index) for index, entry in enumerate(layers)),
            str(document.get("name", "model")),
        )

    def to_document(self) -> dict[str, object]:
        """A JSON-ready form; values at their default are left out."""
        return {"name": self.name, "layers": [_layer_document(layer) for layer in self.layers]}


@dataclass(frozen=True)
class DeviceSpec:
    """One device of the machine.

    Attributes:
        name: shown in timelines.
        kind: devices of one kind share measured costs (see ``Workload.costs_by_kind``).
        speed: layer times are divided by it.
        memory_bytes: what stages may use; None for no limit.
        upload_bytes_per_ms: host to device; None for uploads that take no time.
        download_bytes_per_ms: device to host; None for downloads that take no time.
        link: name of the host link it shares with others; None for a link of its own.
    """

    name: str = "device"
    kind: str = ""
    speed: float = 1.0
    memory_bytes: int | None = None
    upload_bytes_per_ms: float | None = None
    download_bytes_per_ms: float | None = None
    link: str | None = None

    def __post_init__(self) -> None:
        for name in ("speed", "memory_bytes", "upload_bytes_per_ms", "download_bytes_per_ms"):
            value = getattr(self, name)
            if value is not None:
                _check_amount(f"DeviceSpec.{name}", value, above_zero=True)


@dataclass(frozen=True)
class Machine:
    """The devices in the order in which they take turns.

    Attributes:
        devices: at least one.
        hop_ms: charged when a microbatch goes to a stage on another device.
        links: bytes per millisecond of each shared host link, in each direction.
        stage_ms: what a device spends on every microbatch of every stage besides the layers' times.
    """

    devices: tuple[DeviceSpec, ...]
    hop_ms: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    stage_ms: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise InvalidValueError("Machine got no devices; expected at least one")
        _check_amount("Machine.hop_ms", self.hop_ms)
        _check_amount("Machine.stage_ms", self.stage_ms)
        for name, rate in self.links.items():
            _check_amount(f"Machine.links[{name!r}]", rate, above_zero=True)
        for device in self.devices:
            if device.link is not None and device.link not in self.links:
                raise InvalidValueError(
                    f"device {device.name} shares link {device.link!r}, which Machine.links lacks; "
                    f"it has {sorted(self.links)}"
                )

    def __len__(self) -> int:
        return len(self.devices)

    @classmethod
    def uniform(
        cls,
        devices: int,
        hop_ms: float = 0.0,
        *,
        like: DeviceSpec | None = None,
        links: Mapping[str, float] | None = None,
        stage_ms: float = 0.0,
    ) -> Machine:
        """``devices`` equal devices, numbered from 0.

        Args:
            devices: how many.
            hop_ms: see above.
            like: what each of them can do.
            links: see above.
            stage_ms: see above.
        """
        pattern = like or DeviceSpec()
        named = (replace(pattern, name=f"{pattern.name}:{index}") for index in range(devices))
        return cls(tuple(named), hop_ms, links or {}, stage_ms)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every device, and the way to it, is like every other."""
        return len({replace(device, name="") for device in self.devices}) == 1


def _check_amount(what: str, value: object, *, above_zero: bool = False) -> None:
    expected = "a number above 0" if above_zero else "a number of at least 0"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidTypeError(f"{what} is {value!r}; expected {expected}")
    if not 0 <= value < float("inf") or (above_zero and value == 0):
        raise InvalidValueError(f"{what} is {value}; expected {expected}")


def _layer_from(entry: object, index: int) -> LayerCost:
    if not isinstance(entry, Mapping):
        raise InvalidTypeError(f"layers[{index}] is {entry!r}; expected an object with its costs")
    known = [item.name for item in fields(LayerCost)]
    foreign = sorted(set(entry) - set(known))
    if foreign:
        raise InvalidValueError(f"layers[{index}] has {foreign[0]!r}; known names are {known}")
    if "forward_ms" not in entry:
        raise InvalidValueError(f"layers[{index}] lacks 'forward_ms'")
    return LayerCost(**entry)


def _layer_document(layer: LayerCost) -> dict[str, object]:
    defaults = {item.name: item.default for item in fields(LayerCost)}
    values: Iterable[tuple[str, object]] = (
        (item.name, getattr(layer, item.name)) for item in fields(LayerCost)
    )
    return {name: value for name, value in values if value != defaults[name]}
