"""Reading a recipe: YAML, overrides from the command line, and errors that say where."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import Recipe

Keys = tuple["str | int", ...]


class _Loader(yaml.SafeLoader):
    """Reads ``5e-5`` as the number it is; YAML 1.1 takes it for text for want of a dot."""


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that ``_Loader`` would take for numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$", re.ASCII),
        list("-+0123456789"),
    )


@dataclass
class _Draft:
    """A recipe that is not validated yet, and where each of its keys was given."""

    name: str
    values: dict[str, Any]
    places: dict[Keys, str] = field(default_factory=dict)

    def place(self, keys: Keys) -> str:
        """Where ``keys``, or the nearest section around them, was given."""
        # A key of the file may be a number; the places are kept by its text.
        texts = tuple(map(str, keys))
        for length in range(len(texts), 0, -1):
            if texts[:length] in self.places:
                return self.places[texts[:length]]
        return self.name

    def order(self, keys: Keys) -> int:
        """A number that sorts keys by where they were given: the file from the top, overrides."""
        line = re.fullmatch(rf"{re.escape(self.name)}:(\d+)", self.place(keys))
        return int(line[1]) if line else sys.maxsize


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate the recipe at ``path``, with ``key=value`` overrides.

    Args:
        path: a YAML file.
        overrides: ``section.key=value``, the value as YAML; later ones win.

    Raises:
        UsageError: the file cannot be read, or says something a recipe may not say. Every problem
            is reported, each with the line or the override it comes from.
    """
    draft = _parse(Path(path))
    for override in overrides:
        _override(draft, override)
    try:
        recipe = Recipe.model_validate(draft.values)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda e: draft.order(e["loc"]))
        raise UsageError([_describe(draft, dict(e)) for e in found]) from None
    if problems := [f"{draft.place(keys)}: {text}" for keys, text in _contradictions(recipe)]:
        raise UsageError(problems)
    return recipe


def write_recipe(recipe: Recipe, path: Path, comments: Sequence[str] = ()) -> None:
    """Write ``recipe`` with every default filled in, so that the same run can be repeated."""
    # In ASCII: raw, a few characters (such as U+0085) would read back as something else.
    text = yaml.dump(recipe.model_dump(), Dumper=_Dumper, sort_keys=False)
    path.write_text("".join(f"# {line}\n" for line in comments) + text, encoding="utf-8")


def _parse(path: Path) -> _Draft:
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{name}: there is no such recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: cannot be read as a UTF-8 text file: {error}") from None
    node, values = _compose(text, name)
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{name}: a recipe is a list of 'section:' entries, found {_show(values)}")
    draft = _Draft(name, values)
    for keys, line_number in _key_lines(node, ()):
        if keys in draft.places:
            raise UsageError(f"{name}:{line_number}: '{_dotted(keys)}' is given a second time")
        draft.places[keys] = f"{name}:{line_number}"
    return draft


def _compose(text: str, name: str) -> tuple[yaml.Node | None, Any]:
    """The YAML document in ``text``: its nodes, which know their lines, and its values."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def _key_lines(node: yaml.MappingNode, above: Keys) -> Iterator[tuple[Keys, int]]:
    for key, value in node.value:
        keys = (*above, str(key.value))
        yield keys, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _key_lines(value, keys)


def _override(draft: _Draft, override: str) -> None:
    place = f"--set {override}"
    dotted, equals, text = override.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise UsageError(f"{place}: expected key=value, such as training.steps=10")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise UsageError(f"{place}: {text!r} is not a valid YAML value; quote it?") from None
    section = draft.values
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
            draft.places[keys[:depth]] = place
        section = section[key]
        if not isinstance(section, dict):
            raise UsageError(f"{place}: '{_dotted(keys[:depth])}' is a value, not a section")
    section[keys[-1]] = value
    for known in [known for known in draft.places if known[: len(keys)] == keys]:
        del draft.places[known]
    draft.places[keys] = place


def _describe(draft: _Draft, error: Mapping[str, Any]) -> str:
    keys: Keys = error["loc"]
    kind: str = error["type"]
    place = f"{draft.place(keys)}: {_dotted(keys)}"
    if kind == "extra_forbidden":
        return f"{place}: no such key{_suggestion(keys)}"
    if kind == "missing":
        return f"{place}: is missing and has no default"
    return f"{place}: expected {_expected(error)}, got {_show(error['input'])}"


def _expected(error: Mapping[str, Any]) -> str:
    limits = error.get("ctx", {})
    kind = error["type"]
    by_kind = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a text or a list of texts",
        "dict_type": "a section of 'key: value' entries",
        "model_type": "a section of 'key: value' entries",
        "model_attributes_type": "a section of 'key: value' entries",
        "invalid_key": "a key that is text",
        "string_too_short": "some text",
        "too_short": "at least one entry",
        "finite_number": "a finite number",
        "literal_error": f"one of {str(limits.get('expected')).replace(' or ', ', ')}",
        "greater_than": f"a number above {limits.get('gt')}",
        "greater_than_equal": f"a number of at least {limits.get('ge')}",
        "less_than": f"a number below {limits.get('lt')}",
        "less_than_equal": f"a number of at most {limits.get('le')}",
    }
    return by_kind.get(kind, f"a value that fits ({error['msg']})")


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, (dict, list)):
        return "a section" if isinstance(value, dict) else "a list"
    return str(value)


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _suggestion(keys: Keys) -> str:
    siblings = _keys_of(keys[:-1])
    wrong = str(keys[-1])
    if near := difflib.get_close_matches(wrong, siblings, n=1):
        return f"; did you mean '{near[0]}'?"
    everywhere = {known[-1]: _dotted(known) for known in _all_keys(Recipe, ())}
    if near := difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.75):
        return f"; did you mean '{everywhere[near[0]]}'?"
    return f"; the keys here are {', '.join(siblings)}"


def _keys_of(section: Keys) -> list[str]:
    model: type[BaseModel] = Recipe
    for key in section:
        model = cast("type[BaseModel]", _section_type(model.model_fields[str(key)].annotation))
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, info in model.model_fields.items():
        yield (*above, name)
        if section := _section_type(info.annotation):
            yield from _all_keys(section, (*above, name))


def _section_type(annotation: object) -> type[BaseModel] | None:
    """The section class in ``annotation``, which may be optional."""
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _contradictions(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    training, warmup = recipe.training, recipe.schedule.warmup_steps
    pieces = training.microbatches
    if pieces is not None and pieces > training.batch_size:
        yield (
            ("training", "microbatches"),
            f"training.microbatches: {pieces} pieces cannot be cut from a batch of "
            f"{training.batch_size} sequences (training.batch_size)",
        )
    if warmup > training.steps:
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: a warm-up of {warmup} steps does not fit into "
            f"{training.steps} steps (training.steps)",
        )
