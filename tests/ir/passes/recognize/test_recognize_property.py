"""Random shapes of the reference models keep their logits through recognition."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kogc.models.build import build_model

SLOW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def llama(draw):
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 5, 8]))
    return {
        "model_type": "llama", "hidden_size": draw(st.sampled_from([8, 21, 34])), "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": draw(st.sampled_from([2, 8, 14, 24, 96])),
        "intermediate_size": draw(st.sampled_from([5, 17, 31])), "vocab_size": draw(st.sampled_from([7, 29])), "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32, "rope_theta": 1e6, "tie_word_embeddings": draw(st.booleans()), "attention_bias": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def laneformer(draw):
    lanes = draw(st.sampled_from([1, 2, 3, 8]))
    kv_heads = lanes * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    layers, delay = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    return {
        "model_type": "laneformer", "num_lanes": lanes, "hidden_size": draw(st.sampled_from([1, 2, 3])) * 2 * heads, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": lanes * draw(st.integers(1, 9)),
        "vocab_size": 24, "norm_eps": 1e-5, "max_position_embeddings": 32, "rope_theta": 500.0, "broadcast_delay": delay,
        "use_early_comm": draw(st.booleans()), "use_comm": draw(st.sampled_from([True, True, False])),
        "lm_head_type": draw(st.sampled_from(["replicate", "lane", "vocab_parallel"])), "replicated_rmsn_scale": draw(st.booleans()),
        "swa_layers": list(range(draw(st.integers(0, layers)))), "sliding_window": draw(st.integers(1, 30)),
    }  # fmt: skip


def built(config: dict, capacity: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(config, capacity).double()


@pytest.mark.slow
@SLOW
@given(config=llama(), capacity=st.integers(5, 18))
def test_llama_shapes(recognized, config, capacity):
    recognized(built(config, capacity), length=capacity)


@pytest.mark.slow
@SLOW
@given(config=laneformer(), capacity=st.integers(5, 18))
def test_laneformer_shapes(recognized, config, capacity):
    recognized(built(config, capacity), length=capacity)
