"""The exception tree, and saying where in the pipeline an exception happened.

Every exception that roundpipe itself raises derives from :class:`RoundPipeError`. Bad input is
also a ``ValueError`` or ``TypeError``, so ordinary ``except`` clauses work. Exceptions of user code
(layers, loss functions, step functions) are never wrapped: they travel home as the same object,
with a note that says where they happened.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class RoundPipeError(Exception):
    """Root of every exception that roundpipe raises on its own account."""


class InvalidValueError(RoundPipeError, ValueError):
    """An argument has the right type and an impossible value."""


class InvalidTypeError(RoundPipeError, TypeError):
    """An argument has a type that roundpipe cannot use."""


class StateError(RoundPipeError, RuntimeError):
    """A call came at a moment, or in an order, that has no meaning."""


class Cancelled(RoundPipeError):  # noqa: N818 - control flow inside the engine, never seen by users
    """Raised in a worker whose run was ended by somebody else's failure."""


@dataclass(frozen=True)
class Where:
    """The place of a failure; fields that are not known stay ``None``.

    Attributes:
        model: name of the RoundPipe.
        layer: index and class, as ``3 (Linear)``.
        stage: the stage, as ``1 (layers 2..3)``.
        microbatch: index of the microbatch.
        phase: ``forward``, ``recompute``, ``backward``, ``loss``, ``split``, ``merge``, ``upload``,
            ``download`` or ``step``.
        device: name of the device.
    """

    model: str | None = None
    layer: str | None = None
    stage: str | None = None
    microbatch: int | None = None
    phase: str | None = None
    device: str | None = None

    def __str__(self) -> str:
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {value}" for name, value in pairs if value is not None)


def add_where(error: BaseException, where: Where, consequence: str | None = None) -> None:
    """Note on ``error`` where it happened; the object itself stays the same.

    Args:
        error: the exception on its way to the user.
        where: the place.
        consequence: what the failure cost, when it cost something.
    """
    text = f"roundpipe: {where}"
    add_note(error, f"{text}; {consequence}" if consequence else text)


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``, also on Python 3.10, where exceptions have no such method.

    There the note is kept in ``__notes__`` all the same, the attribute that later versions use.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes = [*getattr(error, "__notes__", []), note]
        setattr(error, "__notes__", notes)  # noqa: B010 - unknown to type checkers on 3.10
