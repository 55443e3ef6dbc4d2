"""Hypothesis strategies: configurations of the reference models, and how to compile and feed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

#: Prompts around the edges of a step of four tokens.
PROMPT_LENGTHS = (1, 3, 4, 5, 8, 9)
HEAD_DIMS = (8, 10, 16, 24, 32, 64, 96, 128)
HIDDEN = (13, 24, 37, 61, 64, 101)
VOCAB = (11, 29, 53, 64, 101, 307)


@dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and the prompts it continues. ``as_file``: by way of a .pt file, else a live module."""

    config: dict[str, Any]
    capacity: int
    dtype: str
    workers: int
    as_file: bool
    prompts: tuple[int, ...]
    seed: int


@st.composite
def llama_configs(draw) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 5, 7, 8]))
    stretched = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "model_type": "llama", "hidden_size": draw(st.sampled_from(HIDDEN)), "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "intermediate_size": draw(st.sampled_from([5, 17, 48, 97])), "vocab_size": draw(st.sampled_from(VOCAB)),
        "max_position_embeddings": 512, "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "rope_theta": draw(st.sampled_from([100.0, 1e4, 5e5])), "rope_scaling": draw(st.sampled_from([None, None, stretched])),
        "tie_word_embeddings": draw(st.booleans()), "attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def laneformer_configs(draw) -> dict[str, Any]:
    """Lanes, delays, all three ways of summing, head types, per-lane norms and windows shorter and longer than the text."""
    lanes = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = lanes * draw(st.sampled_from([1, 1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    layers, delay = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    head_type = draw(st.sampled_from(["replicate", "replicate", "lane", "vocab_parallel"]))
    replicate = head_type == "replicate"
    vocab = draw(st.sampled_from(VOCAB))
    windows = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    return {
        "model_type": "laneformer", "num_lanes": lanes, "hidden_size": draw(st.sampled_from(HIDDEN)), "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": draw(st.sampled_from([8, 10, 16, 24, 24, 32, 96])),
        "intermediate_size": lanes * draw(st.sampled_from([5, 17, 32])), "vocab_size": vocab if replicate else lanes * -(-vocab // lanes),
        "max_position_embeddings": 512, "norm_eps": 1e-5, "rope_theta": draw(st.sampled_from([500.0, 1e4])),
        "broadcast_delay": delay, "use_early_comm": draw(st.booleans()),
        "use_attention_comm": draw(st.sampled_from([True, True, True, False])), "use_mlp_comm": draw(st.sampled_from([True, True, True, False])),
        "lm_head_type": head_type, "pre_norm_lane_agg": replicate and draw(st.booleans()),
        "tie_word_embeddings": replicate and draw(st.booleans()), "replicated_rmsn_scale": draw(st.booleans()),
        "swa_layers": [layer for layer, short in enumerate(windows) if short], "sliding_window": draw(st.sampled_from([1, 3, 7, 20, 100])),
    }  # fmt: skip


@st.composite
def cases(draw, configs) -> Case:
    capacity = draw(st.sampled_from([9, 16, 33, 70, 141]))
    return Case(
        config=draw(configs),
        capacity=capacity,
        dtype=draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        workers=draw(st.integers(1, 5)),
        as_file=draw(st.booleans()),
        prompts=tuple(draw(st.lists(st.sampled_from(PROMPT_LENGTHS), min_size=2, max_size=3, unique=True))),
        seed=draw(st.integers(0, 2**16)),
    )
