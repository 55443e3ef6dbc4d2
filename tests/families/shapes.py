"""Small shapes of the model families of Hugging Face Transformers: two of each, the second with odd numbers of heads and features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Positions the models have, and those they are compiled for.
POSITIONS, CONTEXT = 64, 40

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A configuration class of Transformers and its fields; ``what`` says what is special about the shape. ``refused``: the op
    and the words of the message with which it is not recognised."""

    family: str
    config: str
    what: str
    fields: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.family}: {self.what}"


def _even(**more: Any) -> dict[str, Any]:
    """Two query heads to a key/value head, head size 8."""
    return {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": None, **more,
    }  # fmt: skip


def _odd(head_dim: int | None = 10, **more: Any) -> dict[str, Any]:
    """Three query heads to a key/value head, head size 10 unless the family takes it from the hidden size: then 12."""
    sizes = {"head_dim": head_dim} if head_dim else {}
    width = 42 if head_dim else 72
    return {
        "vocab_size": 101, "hidden_size": width, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": None, **sizes, **more,
    }  # fmt: skip


def _gpt2(**more: Any) -> dict[str, Any]:
    return {"n_positions": POSITIONS, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, **more}


def _neox(width: int, heads: int, rotary: float, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 96, "hidden_size": width, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": heads,
        "max_position_embeddings": POSITIONS, "rope_parameters": _rope(partial_rotary_factor=rotary), **more,
    }  # fmt: skip


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 500.0, **more}


_ALTERNATING = ["sliding_attention", "full_attention"]
_SANDWICH = {"query_pre_attn_scalar": 13, "sliding_window": 7}

_GPTJ = {"n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 1}

SHAPES = (
    Shape("llama", "LlamaConfig", "Llama 2", _even()),
    Shape("llama", "LlamaConfig", "Llama 3 RoPE scaling, tied", _odd(rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    Shape("mistral", "MistralConfig", "sliding window", _even(sliding_window=9)),
    Shape("mistral", "MistralConfig", "no window", _odd(sliding_window=None)),
    Shape("qwen2", "Qwen2Config", "QKV bias", _even()),
    Shape("qwen2", "Qwen2Config", "QKV bias, tied", _odd(None, tie_word_embeddings=True)),
    Shape("qwen3", "Qwen3Config", "QK-norm", _even(head_dim=8)),
    Shape("qwen3", "Qwen3Config", "QK-norm, tied", _odd(tie_word_embeddings=True)),
    Shape("smollm3", "SmolLM3Config", "every second layer without RoPE", _even(no_rope_layer_interval=2, eos_token_id=1, bos_token_id=0)),
    Shape("smollm3", "SmolLM3Config", "layers without RoPE, windows", _odd(
        None, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=7, eos_token_id=1, bos_token_id=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )),
    Shape("phi3", "Phi3Config", "fused QKV and gate/up", _even(eos_token_id=1)),
    Shape("phi3", "Phi3Config", "partial rotary, window", _odd(
        None, eos_token_id=1, rope_parameters=_rope(partial_rotary_factor=0.5), sliding_window=11
    )),
    Shape("phi3", "Phi3Config", "LongRoPE, compiled for its short context", _even(
        eos_token_id=1, original_max_position_embeddings=48, rope_parameters={
            "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 48,
        },
    )),
    Shape("gemma2", "Gemma2Config", "soft-caps, alternating windows", _even(head_dim=8, layer_types=_ALTERNATING, **_SANDWICH)),
    Shape("gemma2", "Gemma2Config", "soft-caps that bite", _odd(
        layer_types=[*_ALTERNATING, "sliding_attention"], attn_logit_softcapping=1.5, final_logit_softcapping=2.0, **_SANDWICH
    )),
    Shape("gemma3", "Gemma3TextConfig", "QK-norm, local and global RoPE", _even(head_dim=8, layer_types=_ALTERNATING, **_SANDWICH)),
    Shape("gemma3", "Gemma3TextConfig", "linear RoPE scaling", _odd(
        layer_types=[*_ALTERNATING, "sliding_attention"], **_SANDWICH,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0}, "sliding_attention": _rope()},
    )),
    Shape("olmo2", "Olmo2Config", "post-norms, QK-norm over the whole width", _even(eos_token_id=1)),
    Shape("olmo2", "Olmo2Config", "the same, grouped queries", _odd(None, eos_token_id=1)),
    Shape("granite", "GraniteConfig", "multipliers", _even(
        embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.3, attention_multiplier=0.2
    )),
    Shape("granite", "GraniteConfig", "multipliers, biases, tied", _odd(
        None, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.1, tie_word_embeddings=True,
        attention_bias=True, mlp_bias=True,
    )),
    Shape("starcoder2", "Starcoder2Config", "LayerNorm, GELU, biases", _even(bos_token_id=0, eos_token_id=1)),
    Shape("starcoder2", "Starcoder2Config", "LayerNorm without biases, window", _odd(
        None, bos_token_id=0, eos_token_id=1, use_bias=False, sliding_window=9
    )),
    Shape("gpt2", "GPT2Config", "learned positions, Conv1D", _gpt2(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
    Shape("gpt2", "GPT2Config", "scores by layer index", _gpt2(
        vocab_size=101, n_embd=45, n_layer=3, n_head=5, n_inner=52, scale_attn_by_inverse_layer_idx=True, activation_function="relu"
    )),
    Shape("gpt_neox", "GPTNeoXConfig", "parallel blocks, partial rotary", _neox(32, 4, 0.5)),
    Shape("gpt_neox", "GPTNeoXConfig", "blocks in sequence", _neox(60, 5, 0.5, use_parallel_residual=False, attention_bias=False)),
    Shape("stablelm", "StableLmConfig", "partial rotary, QKV bias", _even(use_qkv_bias=True, rope_parameters=_rope(partial_rotary_factor=0.25))),
    Shape("stablelm", "StableLmConfig", "parallel blocks", _odd(
        None, use_parallel_residual=True, rope_parameters=_rope(partial_rotary_factor=0.5)
    )),
    Shape("stablelm", "StableLmConfig", "a LayerNorm of its own for every head", _even(qk_layernorm=True, use_qkv_bias=True)),
)  # fmt: skip

#: Families that nobody asked for: what is recognised by its graph needs no list. One shape each.
MORE = (
    Shape("arcee", "ArceeConfig", "squared ReLU", _odd(None, bos_token_id=0, eos_token_id=1)),
    Shape("codegen", "CodeGenConfig", "interleaved partial rotary, parallel blocks", {"vocab_size": 96, "n_ctx": POSITIONS, **_GPTJ}),
    Shape("cohere", "CohereConfig", "interleaved rotary, LayerNorm without bias, parallel blocks", _odd(None, eos_token_id=1, logit_scale=0.3)),
    Shape("exaone4", "Exaone4Config", "post-norms, QK-norm, window and full layers", _even(
        sliding_window=9, layer_types=["sliding_attention", "full_attention"], eos_token_id=1, bos_token_id=0
    )),
    Shape("falcon", "FalconConfig", "one key/value head, parallel blocks", {
        "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": POSITIONS,
    }),
    Shape("gemma", "GemmaConfig", "embedding scale, norms from 1", _odd()),
    Shape("glm4", "Glm4Config", "interleaved partial rotary, norms on both sides", _even(head_dim=8)),
    Shape("gpt_bigcode", "GPTBigCodeConfig", "learned positions, one key/value head", _gpt2(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
    Shape("gptj", "GPTJConfig", "interleaved partial rotary, parallel blocks", {"vocab_size": 96, **_GPTJ}),
    Shape("helium", "HeliumConfig", "interleaved rotary", _odd(12, hidden_size=72)),
    Shape("olmo", "OlmoConfig", "LayerNorm without weights", _odd(None, eos_token_id=1)),
    Shape("persimmon", "PersimmonConfig", "QKV head by head, LayerNorm per head", {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }),
    Shape("phi", "PhiConfig", "partial rotary, parallel blocks, biases", _even(rope_parameters=_rope(partial_rotary_factor=0.5))),
    Shape("qwen2", "Qwen2Config", "YaRN", _even(
        rope_parameters=_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    )),
    Shape("seed_oss", "SeedOssConfig", "biases, head size of its own", _odd(eos_token_id=1)),
)  # fmt: skip

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

REFUSED = (
    Shape("bloom", "BloomConfig", "ALiBi", {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}, ("aten.baddbmm", "addmm with factors")),
    Shape("gpt_oss", "GptOssConfig", "attention sinks, experts", _even(head_dim=8, **_EXPERTS), ("aten.cat", "a weight and attention scores")),
    Shape("mixtral", "MixtralConfig", "experts", _even(**_EXPERTS), ("aten.softmax", "not attention scores over a KV cache (a router of experts?)")),
    Shape("nemotron", "NemotronConfig", "LayerNorm scales from 1", _even(), ("aten.layer_norm", "a number is added to a weight of layer_norm")),
)  # fmt: skip
