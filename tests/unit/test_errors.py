"""The exception tree, and notes."""

from __future__ import annotations

import pytest

from roundpipe import RoundPipeError
from roundpipe.errors import (
    Cancelled,
    InvalidTypeError,
    InvalidValueError,
    StateError,
    Where,
    add_note,
    add_where,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidValueError, ValueError),
        (InvalidTypeError, TypeError),
        (StateError, RuntimeError),
        (Cancelled, Exception),
    ],
)
def test_every_exception_has_the_root_and_the_builtin_that_one_expects(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, RoundPipeError)
    assert issubclass(kind, builtin)


def test_a_place_shows_what_is_known_of_it() -> None:
    where = Where("net", "3 (Linear)", "1 (layers 2..3)", 0, "backward", "cpu:1")
    assert str(where) == (
        "model net, layer 3 (Linear), stage 1 (layers 2..3), microbatch 0, phase backward, "
        "device cpu:1"
    )
    assert str(Where(model="net", phase="step")) == "model net, phase step"


def test_notes_say_where_and_what_it_cost() -> None:
    error = KeyError("x")
    add_where(error, Where(model="net"))
    add_where(error, Where(phase="split"), "gradients were dropped")
    assert getattr(error, "__notes__", None) == [
        "roundpipe: model net",
        "roundpipe: phase split; gradients were dropped",
    ]


def test_notes_are_kept_where_exceptions_have_no_method_for_them() -> None:
    class Old(Exception):  # noqa: N818
        @property
        def add_note(self) -> None:
            raise AttributeError

    error = Old("x")
    add_note(error, "one")
    add_note(error, "two")
    assert getattr(error, "__notes__", None) == ["one", "two"]
