"""Loading: memory-mapped, converted, GGUF; random models; how much memory each takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf

from cli.gguf_file import write_gguf
from cli.tiny import make_model, make_tokenizer
from hf.families import LAYERS, _config, build
from hf.test_families import QUICK
from roundpipe import wrap_model_to_roundpipe
from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.hf import init_random, load_model, load_tokenizer, reading_once

MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of 36 MiB in bfloat16, nearly all of it in two matrices."""
    place = tmp_path / "model"
    init_random(large_config(), torch.bfloat16).save_pretrained(place)
    return place


def large_config() -> tf.LlamaConfig:
    return tf.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=36 * 1024,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def mapped_files() -> list[tuple[int, int, str]]:
    """Address ranges that are views of files."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6:
            begin, _, end = parts[0].partition("-")
            found.append((int(begin, 16), int(end, 16), parts[5]))
    return found


def is_mapped(tensor: torch.Tensor, folder: Path) -> bool:
    address = tensor.data_ptr()
    return any(
        begin <= address < end and name.startswith(str(folder))
        for begin, end, name in mapped_files()
    )


def anonymous_bytes() -> int:
    """Memory of the process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


class Watch:
    """Samples the process's memory beside the work."""

    def __init__(self) -> None:
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    @contextmanager
    def around(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            self.peak = max(self.peak, anonymous_bytes())

    @property
    def grown_bytes(self) -> int:
        return self.peak - self.before


def watched(function: Callable[[], Any]) -> tuple[Any, int]:
    gc.collect()
    watch = Watch()
    with watch.around():
        result = function()
    return result, watch.grown_bytes


def weight_bytes(model: Any) -> int:
    return sum(
        p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values()
    )


def test_weights_stay_views_of_the_file_also_while_they_are_used(folder: Path) -> None:
    model, grown_bytes = watched(lambda: load_model(folder))
    assert all(is_mapped(p, folder) for p in model.parameters())
    assert grown_bytes < weight_bytes(model) / 3
    stamp = (folder / "model.safetensors").read_bytes()
    ids = torch.arange(12).reshape(3, 4)
    with wrap_model_to_roundpipe(model, True, devices="cpu:2", pin_model="off") as pipe:
        with torch.no_grad():
            pipe(input_ids=ids)
        assert all(is_mapped(p, folder) for p in model.parameters())
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
        pipe.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=lambda out, _: out.loss
        )
        pipe.step(optimizer.step, is_async=False)
        assert not torch.equal(model.lm_head.weight, load_model(folder).lm_head.weight)
    assert (folder / "model.safetensors").read_bytes() == stamp


def test_a_converted_model_is_in_memory_once(folder: Path) -> None:
    model, grown_bytes = watched(lambda: load_model(folder, torch.float32))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert weight_bytes(model) > 70 * MIB
    assert grown_bytes < 1.3 * weight_bytes(model)
    assert not model.training
    stored = load_model(folder)
    assert torch.equal(stored.lm_head.weight.float(), model.lm_head.weight)


def test_a_random_model_is_in_memory_once() -> None:
    model, grown_bytes = watched(lambda: init_random(large_config(), torch.float32))
    assert grown_bytes < 1.3 * weight_bytes(model)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", sorted(set(QUICK) - {"git"}))
def test_random_models_have_everything_that_built_ones_have(name: str) -> None:
    built = build(name).model
    model = init_random(built.config, torch.float32, model_class=type(built))
    again = init_random(built.config, torch.float32, model_class=type(built))
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in built.state_dict().items()
    }
    for (key, parameter), same in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, same), key
        assert parameter.isfinite().all(), key
    for key, buffer in built.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    shared = {n for n, _ in built.named_parameters(remove_duplicate=False)}
    assert {n for n, _ in model.named_parameters(remove_duplicate=False)} == shared
    assert len(list(model.parameters())) == len(list(built.parameters()))


def test_random_models_take_dtype_and_seed() -> None:
    config = _config("llama")
    assert config.num_hidden_layers == LAYERS
    state = torch.get_rng_state()
    first, second = init_random(config, torch.bfloat16), init_random(config, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.training
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in second.parameters()} == {torch.float32}
    assert not torch.allclose(first.lm_head.weight.float(), second.lm_head.weight, atol=1e-2)
    with pytest.raises(InvalidTypeError, match="config is a str; give a config of transformers"):
        init_random("llama")
    with pytest.raises(InvalidTypeError, match=r"dtype is 'bf16'; expected a torch.dtype"):
        init_random(config, "bf16")  # type: ignore[arg-type]


class Computing(tf.LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.arange(4) * 2)


def test_a_model_that_computes_in_its_constructor_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="table of Computing is computed in the constr"):
        init_random(_config("llama"), model_class=Computing)


# GGUF


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(make_model(), path)
    return path


def test_a_gguf_model_is_unpacked_and_can_be_saved(gguf_path: Path, tmp_path: Path) -> None:
    model = load_model(gguf_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_model(gguf_path, torch.bfloat16).parameters()} == {torch.bfloat16}
    ids = torch.arange(6).reshape(1, 6)
    original = make_model().eval()
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=0, atol=0.02)
    model.save_pretrained(tmp_path)
    saved = load_model(tmp_path)
    assert torch.equal(saved(ids).logits, model(ids).logits)


def test_a_gguf_file_is_read_once(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a real file has a hundred thousand strings, and was read for each purpose."""
    reads: list[Any] = []
    tables: list[Any] = []
    reader, table = gguf.GGUFReader, gguf.get_tensor_name_map

    def counting_reader(*args: Any) -> Any:
        reads.append(args)
        return reader(*args)

    def counting_table(*args: Any) -> Any:
        tables.append(args)
        return table(*args)

    monkeypatch.setattr(gguf, "GGUFReader", counting_reader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", counting_table)
    with reading_once():
        tokenizer = load_tokenizer(gguf_path)
        load_model(gguf_path)
    assert len(reads) == 1
    assert len(tables) == 1
    assert gguf.GGUFReader is counting_reader
    assert tokenizer.decode(tokenizer("while")["input_ids"]).strip() == "while"


# Sources


def test_a_folder_with_its_tokenizer(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    assert load_tokenizer(str(folder)).eos_token == "<|end|>"
    assert load_model(str(folder)).config.model_type == "llama"


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_sources_that_are_not_there(load: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InvalidValueError, match=r"is a file, but no \.gguf file; pass the folder"):
        load(tmp_path / "weights.bin")
    for source in (tmp_path / "none", "./none", "none.gguf"):
        with pytest.raises(InvalidValueError, match="there is no file or folder"):
            load(source)
    with pytest.raises(InvalidTypeError, match="source is a int; expected a folder"):
        load(3)


def test_a_dtype_that_is_none(folder: Path) -> None:
    with pytest.raises(InvalidTypeError, match=r"dtype is 'float32'; expected a torch.dtype"):
        load_model(folder, "float32")  # type: ignore[arg-type]
