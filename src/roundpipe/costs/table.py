"""A model's costs as a table, and as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan import ENGINE_RULES, EngineRules, LayerCosts, Machine, Workload
from roundpipe.plan.documents import machine_to_document, workload_from_document

SOURCES = ("estimated", "loaded", "measured")

_COLUMNS = (
    "layer", "forward ms", "recompute ms", "backward ms", "step ms", "weights MiB",
    "upload ms", "gradients MiB", "download ms", "saved input MiB", "activations MiB",
)  # fmt: skip
_MIB = 1 << 20


@dataclass(frozen=True)
class ModelCosts:
    """What a model's layers cost on one kind of device, for one microbatch.

    Attributes:
        layers: one record per layer, in order.
        machine: the devices, with the rates and hand-over times seen on them.
        microbatches: of a call.
        kind: the devices' type, as ``cuda`` or ``cpu``.
        source: ``"estimated"`` from sizes (times then only mean something beside each other),
            ``"loaded"`` from a file, or ``"measured"``.
        layer_names: the layers' classes, for the table.
        rules: how the engine orders work on such devices.
    """

    layers: LayerCosts
    machine: Machine
    microbatches: int
    kind: str
    source: str = "estimated"
    layer_names: tuple[str, ...] = ()
    rules: EngineRules = ENGINE_RULES

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a row of headings, then one row per layer. ``-`` is for what is not known."""
        device = self.machine.devices[0]
        rows: list[tuple[str, ...]] = [_COLUMNS]
        names = self.layer_names or ("",) * len(self.layers)
        for index, (layer, name) in enumerate(zip(self.layers.layers, names, strict=True)):
            rows.append(
                (
                    f"{index} {name}".strip(),
                    f"{layer.forward_ms:.3f}",
                    f"{layer.again_ms:.3f}",
                    f"{layer.backward_ms:.3f}",
                    f"{layer.optimizer_ms:.3f}",
                    _mib(layer.weight_bytes),
                    _transfer_ms(layer.weight_bytes, device.upload_bytes_per_ms),
                    _mib(layer.gradient_bytes),
                    _transfer_ms(layer.gradient_bytes, device.download_bytes_per_ms),
                    _mib(layer.saved_input_bytes),
                    _mib(layer.activation_bytes),
                )
            )
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        title = (
            f"{self.layers.name}: {self.source} costs of {len(self.layers)} layers per microbatch, "
            f"{len(self.machine)} x {self.kind}; {self.machine.stage_ms:.3f} ms for each stage, "
            f"{self.machine.hop_ms:.3f} ms for a hop to another device"
        )
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([title, *lines])

    def workload(
        self, mode: str = "async", *, run_type: str = "fused", microbatches: int | None = None
    ) -> Workload:
        """What planner and simulator start from.

        Args:
            mode: ``"sync"``, ``"layerwise"`` or ``"async"`` steps.
            run_type: ``"infer"``, ``"train"`` or ``"fused"``.
            microbatches: of an iteration; as many as of a call unless given.
        """
        count = self.microbatches if microbatches is None else microbatches
        return Workload(self.layers, self.machine, count, run_type, mode, rules=self.rules)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a costs file (JSON), for :meth:`load` and for ``roundpipe plan``."""
        text = json.dumps(self._document(), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def _document(self) -> dict[str, Any]:
        return {
            **self.layers.to_document(),
            "machine": machine_to_document(self.machine),
            "microbatches": self.microbatches,
            "mode": "async",
            "rules": {
                "early_recompute": self.rules.early_recompute,
                "overlap_calls": self.rules.overlap_calls,
            },
            "kind": self.kind,
            "source": self.source,
            "layer_names": list(self.layer_names),
        }

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ModelCosts:
        """Read a costs file.

        Raises:
            InvalidTypeError: an entry of the wrong type.
            InvalidValueError: no JSON, or a missing or unknown entry.
            OSError: the file cannot be read.
        """
        document = read_document(path)
        workload = workload_from_document(document)
        names = document.get("layer_names", [])
        if not isinstance(names, list) or len(names) not in (0, len(workload.costs)):
            raise InvalidValueError(
                f"{path}: layer_names are {names!r}; expected a list with a name for each of the "
                f"{len(workload.costs)} layers, or none"
            )
        return cls(
            workload.costs,
            workload.machine,
            workload.microbatches,
            str(document.get("kind", "")),
            "loaded",
            tuple(map(str, names)),
            workload.rules,
        )

    def check_fits(self, sizes: Sequence[int], kind: str) -> None:
        """Refuse costs of another model or of another kind of device.

        Args:
            sizes: bytes of weights of each layer of the model.
            kind: type of its devices.

        Raises:
            InvalidValueError: saying what differs.
        """
        if len(self.layers) != len(sizes):
            raise InvalidValueError(
                f"these costs have {len(self.layers)} layers and the model has {len(sizes)}; load "
                "costs that were saved from the same model"
            )
        for index, (layer, size) in enumerate(zip(self.layers.layers, sizes, strict=True)):
            if layer.weight_bytes != size:
                raise InvalidValueError(
                    f"layer {index} has {size} bytes of weights and {layer.weight_bytes} in these "
                    "costs; load costs that were saved from the same model"
                )
        if self.kind != kind:
            raise InvalidValueError(
                f"these costs are of {self.kind or 'unknown'} devices and the model runs on "
                f"{kind}; load costs that were measured on the same kind of device"
            )


def read_document(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        InvalidTypeError: something else than an object.
        InvalidValueError: no JSON; with the line.
        OSError: the file cannot be read.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValueError(f"{path} is not JSON: {error}; expected a JSON object") from error
    if not isinstance(document, dict):
        raise InvalidTypeError(f"{path} holds {type(document).__name__}; expected a JSON object")
    return document


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f}" if nbytes else "-"


def _transfer_ms(nbytes: int, bytes_per_ms: float | None) -> str:
    return "-" if not nbytes or bytes_per_ms is None else f"{nbytes / bytes_per_ms:.3f}"
