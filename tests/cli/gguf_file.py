"""Writing a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cli.tiny import make_tokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Any, path: Path) -> None:
    """Write ``model`` (tied embedding) with the tiny tokenizer, its matrices in Q8_0 blocks."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = make_tokenizer()
    writer.add_tokenizer_model("gpt2")
    # A merge is expected, and its result among the tokens.
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer) - 1)), "th"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokenizer) - 1))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            _add(writer, _gguf_name(name), _permuted(name, value, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, name: str, values: Any) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(
        name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind
    )


def _permuted(name: str, value: Any, config: Any) -> Any:
    """Queries and keys in llama.cpp's order of the rotary halves."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return value
    rows = value.shape[0] // heads // 2
    return value.reshape(heads, 2, rows, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _gguf_name(name: str) -> str:
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_NAMES['.'.join(parts[2:])]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]
