"""What a verification found, in plain words."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = {
    "attribute": "writes to an attribute during forward",
    "global": "writes outside the layer during forward",
    "random": "draws random numbers that roundpipe does not repeat",
    "device": "is tied to one device",
    "recompute": "does not repeat itself",
    "batch": "depends on how the batch is cut",
    "loss": "is no sum over microbatches",
    "difference": "differs from plain PyTorch",
    "error": "fails in roundpipe only",
    "plain": "fails in plain PyTorch already",
}


@dataclass(frozen=True)
class Finding:
    """One thing that makes roundpipe differ from plain PyTorch, or may do so.

    Attributes:
        kind: one of ``KINDS``.
        layer: where: ``2 (Router)``, or ``loss_fn``.
        text: what was seen, and what to do.
    """

    kind: str
    layer: str
    text: str

    def __str__(self) -> str:
        return f"{self.layer} {KINDS[self.kind]}: {self.text}"


@dataclass
class Report:
    """The result of :func:`roundpipe.verify`; as text, what a user wants to read.

    Attributes:
        findings: what was found; empty if roundpipe trains the model as plain PyTorch does.
        compared: the runs that were held against a plain loop, each in a few words.
    """

    findings: list[Finding] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def add(self, kind: str, layer: str, text: str) -> None:
        """Note a finding, once for each layer and kind of thing."""
        if all((f.kind, f.layer) != (kind, layer) for f in self.findings):
            self.findings.append(Finding(kind, layer, text))

    def of(self, layer: str) -> list[str]:
        """The kinds of findings about one layer."""
        return [finding.kind for finding in self.findings if finding.layer == layer]

    def __str__(self) -> str:
        runs = f"{len(self.compared)} runs compared: {', '.join(self.compared)}"
        if self.ok:
            return (
                f"Equal: outputs, losses, gradients and buffers are those of plain PyTorch.\n{runs}"
            )
        lines = [f"{len(self.findings)} findings:"] if len(self.findings) > 1 else ["1 finding:"]
        lines += [f"- {finding}" for finding in self.findings]
        return "\n".join([*lines, runs])
