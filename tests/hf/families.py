"""A tiny random model of every causal language model family of transformers.

Sizes come from the families' default configs: every number with a well-known name is replaced by a
small one, lists with an entry per layer are shortened so that each kind of entry stays, and some
families have values of their own.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

VOCABULARY = 120
LAYERS = 4  # and 4 heads and 4 experts

_NAMES_BY_SIZE: dict[int, str] = {
    1: "first_k_dense_replace moe_layer_start_index moe_num_shared_experts n_shared_experts "
    "num_dense_layers num_shared_experts topk_group",
    2: "encoder_layers linear_num_key_heads mamba_expand moe_k moe_topk n_group n_mamba_heads "
    "num_encoder_layers num_expert_group num_experts_per_tok num_experts_per_token o_groups "
    "top_k_experts zero_expert_num",
    3: "conv_L_cache moe_layer_end_index",
    4: "chunk_size d_rel decoder_attention_heads decoder_layers encoder_attention_heads "
    "gated_norm_rank index_n_heads index_num_heads linear_num_heads linear_num_value_heads "
    "mamba_chunk_size mamba_dt_rank moe_num_experts n_head n_heads n_layer n_layers "
    "n_routed_experts num_attention_heads num_decoder_attention_heads num_decoder_layers "
    "num_encoder_attention_heads num_experts num_heads num_hidden_layers num_layers "
    "num_local_experts prompt_length rotary_dim swa_num_attention_heads time_step_rank",
    5: "attention_window attention_window_size local_attention sliding_window "
    "sliding_window_size window_size",
    6: "index_topk",
    8: "attention_chunk_size attention_head_size d_kv dim_head global_head_dim head_dim "
    "hidden_size_per_layer_input kv_channels laurel_rank linear_head_dim "
    "linear_key_head_dim linear_value_head_dim loop_gate_rank mamba_d_head mamba_d_state "
    "mamba_head_dim mamba_n_heads mamba_num_heads o_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim ssm_state_size state_size swa_head_dim swa_v_head_dim v_head_dim",
    16: "attention_head_dim expert_ffn_hidden_size index_head_dim kv_lora_rank "
    "moe_intermediate_size moe_shared_expert_intermediate_size q_lora_rank qk_head_dim "
    "rel_extent shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size",
    32: "attention_hidden_size backbone_hidden_size d_model dim emb_dim embedding_size "
    "hidden_size input_embedding_size lru_width n_embd word_embed_proj_dim",
    48: "d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim "
    "feed_forward_size ffn_dim ffn_hidden_size intermediate_size intermediate_size_mlp "
    "n_inner prefix_dense_intermediate_size",
    64: "mamba_d_ssm max_position_embeddings max_seq_len n_ctx n_positions",
    VOCABULARY: "unpadded_vocab_size vocab_size vocab_size_per_layer_input",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
_SIZES["num_nextn_predict_layers"] = 0

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_HYBRID = ["linear_attention", "hybrid"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LEFT_OUT = object()
_GEMMA4 = {
    "per_layer_config": _LEFT_OUT,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "layer_types": _ALTERNATING,
    "num_key_value_heads": 2,
}
_INKLING2 = {"n_layers_per_attn_res_block": 2}
_BLT_VOCABULARY = VOCABULARY + 140

# By model type, what differs from the rules above.
_CHANGES: dict[str, dict[str, Any]] = {
    "blt": {
        "vocab_size": _BLT_VOCABULARY,
        "encoder_hash_byte_group_vocab": 500,
        "patching_threshold": 0.5,
    },
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "blt_local_decoder": {"hidden_size_global": 64, "vocab_size": _BLT_VOCABULARY},
    "blt_local_encoder": {"hidden_size_global": 64, "vocab_size": _BLT_VOCABULARY},
    "blt_patcher": {"vocab_size": _BLT_VOCABULARY},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": _ALTERNATING,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots3_note_text": {
        "per_layer_config": _LEFT_OUT,
        "rope_parameters": None,
        "n_group": 2,
        "topk_group": 1,
        "n_routed_experts": 4,
        "head_dim": 16,
        "kv_lora_rank": 16,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "falcon_h1": {"ssm_multipliers": [1.0] * 5},
    "gemma3n_text": {
        "intermediate_size": [48] * LAYERS,
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATING,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 16,
        }
    },
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "inkling2_loop_text": {
        **_INKLING2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    },
    "inkling2_text": _INKLING2,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "marian": {"decoder_vocab_size": VOCABULARY},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 4,
        "ple_embed_dim": 32,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "xlnet": {"d_head": 8},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "layers_block_type": _HYBRID},
    "zamba2": {
        "hybrid_layer_ids": _LEFT_OUT,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
        "layers_block_type": _HYBRID,
    },
    "zaya": {"num_experts_per_tok": 1},
}
_ENCODERS = {  # they are causal only if told so
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
_NEVER_COPIED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "torch_dtype",
    "transformers_version",
}
# Only the text half exists as a tiny model, or only with the decoder's own config.
_BUILT_AS = {"dots3_note": "dots3_note_text"}

CANNOT_BE_BUILT = {
    "gemma3n": "its vision tower needs timm; the text model is gemma3n_text",
    "gemma4_assistant": "a draft head that needs the key and value states of its target",
    "gemma4_unified_assistant": "a draft head that needs the key and value states of its target",
}
FAMILIES = tuple(name for name in CLASSES if name not in CANNOT_BE_BUILT)


@dataclass(frozen=True)
class Family:
    """A tiny model and batches for it."""

    name: str
    model: nn.Module

    def batch(self, rows: int = 3, length: int = 16) -> dict[str, torch.Tensor]:
        """Tokens with padding in the second row, and labels that leave some of them out."""
        generator = torch.Generator().manual_seed(2)
        vocabulary = getattr(_text_config(self.model.config), "vocab_size", None) or VOCABULARY
        high = min(VOCABULARY, vocabulary) - 6
        ids = torch.randint(3, high, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 3 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, :3] = -100
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.name == "git":
            batch["pixel_values"] = torch.randn(rows, 3, 16, 16, generator=generator)
        if self.name.startswith("musicgen"):
            return _with_codebooks(batch)
        return batch

    def example(self) -> dict[str, torch.Tensor] | None:
        """The small batch to cut the model on, where the default one does not do."""
        special = self.name in ("git", "reformer") or self.name.startswith("musicgen")
        return self.batch(2, 12) if special else None


def build(name: str) -> Family:
    """The tiny model of a family, with random weights that are never all zero."""
    config = _config(_BUILT_AS.get(name, name))
    cls = getattr(transformers, CLASSES[name])
    if name.startswith("musicgen"):
        config = config.decoder
    elif cls.config_class is not type(config) and hasattr(config, "text_config"):
        config = config.get_text_config()
    torch.manual_seed(0)
    try:
        model = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa")
    except ValueError as error:
        if "attention" not in str(error).lower():
            raise
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation="eager")
    _liven(model.float())
    return Family(name, model)


def _config(name: str) -> PretrainedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = AutoConfig.for_model(name)
    values = _shrunk(default.to_dict())
    for key, part in vars(default).items():
        if isinstance(part, PretrainedConfig):
            inner = _shrunk(part.to_dict()) | _CHANGES.get(part.model_type, {})
            values[key] = type(part)(**_present(inner))
    values |= _CHANGES.get(name, {})
    if name in _ENCODERS:
        values["is_decoder"] = True
    return type(default)(**_present(values))


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not _LEFT_OUT}


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _shrunk_value(key, value, config)
        for key, value in config.items()
        if key not in _NEVER_COPIED and not _is_config(value)
    }


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and bool(
        {"hidden_size", "num_hidden_layers", "d_model", "ffn_hidden_size"} & value.keys()
    )


def _shrunk_value(key: str, value: Any, config: dict[str, Any]) -> Any:
    if key.endswith(("token_id", "token_index", "token_ids")):
        return _token(key, value)
    if key in ("rope_parameters", "rope_scaling"):
        return _shrunk_rope(value)
    long = isinstance(value, (list, tuple)) and len(value) > LAYERS
    if long and key != "encoder_hash_byte_group_size":
        return _one_per_layer(list(value))
    if value is None or isinstance(value, bool) or value == 0:
        return value
    if key in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"):
        prefix = "swa_" if key.startswith("swa_") else ""
        return 4 if value == config.get(f"{prefix}num_attention_heads") else 2
    if key in ("n_groups", "mamba_n_groups") or (key in _GROUPS and value == 1):
        return min(value, 2)
    size = _SIZES.get(key, value)
    return [size] * LAYERS if isinstance(value, (list, tuple)) and key in _SIZES else size


_GROUPS = ("n_group", "topk_group", "num_expert_group")


def _token(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [2]
    if not isinstance(value, int) or value < VOCABULARY:
        return value
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(key, VOCABULARY - 1)


def _shrunk_rope(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    lists = ("short_factor", "long_factor")
    return {k: v[:4] if k in lists else copy.deepcopy(v) for k, v in value.items()}


def _one_per_layer(values: list[Any]) -> list[Any]:
    """A short list in which every kind of entry occurs."""
    if not all(isinstance(value, (str, int, float)) for value in values):
        return values
    kinds = list(dict.fromkeys(values))
    return (kinds * LAYERS)[:LAYERS]


def _liven(model: nn.Module) -> None:
    """Weights large enough that every one of them shows in the output."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if not parameter.isfinite().all():
                parameter.copy_(noise * 0.05)
            if parameter.dim() >= 2 and parameter.abs().max() < 0.15 and parameter.std() < 0.05:
                parameter.add_(noise * 0.1)
            elif parameter.abs().max() == 0:
                parameter.add_(noise * 0.05)


def _with_codebooks(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Musicgen: four token streams per row."""
    streams = 4
    ids = batch["input_ids"].repeat_interleave(streams, 0)
    ids = (ids + torch.arange(ids.shape[0])[:, None]) % 50 + 3
    labels = batch["labels"][:, :, None].repeat(1, 1, streams)
    labels = torch.where(labels == -100, labels, labels % 50 + 3)
    return {**batch, "input_ids": ids, "labels": labels}


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # musicgen has two
        return config
