"""Our reference models, every option, recognised and equal to themselves."""

import time

import pytest
import torch

from kogc.frontend.trace import trace
from kogc.ir.passes.recognize import recognize
from kogc.models.build import build_model

SHAPE = {
    "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 40,
    "max_position_embeddings": 20, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {**SHAPE, "model_type": "llama", "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
LANEFORMER = {
    **SHAPE, "model_type": "laneformer", "num_hidden_layers": 3, "num_lanes": 4, "broadcast_delay": 1,
    "use_early_comm": True, "lm_head_type": "replicate", "norm_eps": 1e-5,
}  # fmt: skip


def built(config: dict, **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model({**config, **changes}, 20).double()
    for parameter in model.parameters():  # scales and biases of 1 and 0 would hide mistakes
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 8},
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"head_dim": 2},
        {"rope_scaling": LLAMA3_ROPE},
    ],
    ids=str,
)
def test_llama(recognized, ops, changes):
    graph = recognized(built(LLAMA, **changes))
    assert ops(graph) == {
        "embed": 1, "rms_norm": 5, "linear": 15, "rope": 4, "kv_append": 4, "attention": 2, "gated_activation": 2, "add": 4,
    }  # fmt: skip
    assert sorted(graph.tables) == ["rope.cos", "rope.sin"]
    heads = {n.attrs["heads"] for n in graph if n.op == "attention"}
    assert heads == {changes.get("num_attention_heads", 8)}
    assert {n.attrs["style"] for n in graph if n.op == "rope"} <= {"half"} or changes.get("head_dim") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_lanes": 2},
        {"num_lanes": 1, "broadcast_delay": 0},
        {"broadcast_delay": 0, "use_early_comm": False},
        {"broadcast_delay": 2},
        {"use_early_comm": False},
        {"use_comm": False},
        {"use_attention_comm": True, "use_mlp_comm": False},
        {"lm_head_type": "lane"},
        {"lm_head_type": "vocab_parallel"},
        {"broadcast_delay": 3, "lm_head_type": "lane"},
        {"broadcast_delay": 3, "lm_head_type": "vocab_parallel"},
        {"num_hidden_layers": 1, "lm_head_type": "lane", "replicated_rmsn_scale": False},
        {"pre_norm_lane_agg": True},
        {"replicated_rmsn_scale": False},
        {"replicated_rmsn_scale": False, "num_lanes": 2, "lm_head_type": "lane"},
        {"tie_word_embeddings": True},
        {"swa_layers": [0, 2], "sliding_window": 5},
        {"sliding_window_n_layers": -1, "sliding_window": 7},
        {"swa_layers": [0], "sliding_window": 50},
        {"num_key_value_heads": 8},
    ],
    ids=str,
)
def test_laneformer(recognized, changes):
    graph = recognized(built(LANEFORMER, **changes))
    assert len([n for n in graph if n.op == "attention"]) == changes.get("num_hidden_layers", 3)
    assert {n.attrs["style"] for n in graph if n.op == "rope"} == {"interleaved"}


def test_delayed_sums_are_one_op(recognized, ops):
    counts = ops(recognized(built(LANEFORMER, broadcast_delay=1)))
    assert counts["lane_others"] == 4  # two layers past the delay, attention and MLP
    assert counts["lane_sum"] == 2  # the first layer, early
    assert counts["lane_mean"] == 1


def test_windows(recognized):
    graph = recognized(built(LANEFORMER, swa_layers=[0, 2], sliding_window=5))
    assert [n.attrs["window"] for n in graph if n.op == "attention"] == [5, None, 5]


def test_one_lane_is_a_plain_decoder(recognized, ops):
    graph = recognized(built(LANEFORMER, num_lanes=1, broadcast_delay=0))
    assert not any(op.startswith("lane_") for op in ops(graph))


def test_layers_look_alike(recognized):
    """Lanes begin at the embedding, so that layer 0 has the same ops as the others."""
    graph = recognized(built(LANEFORMER, broadcast_delay=0))
    shapes = [[n.type.shape for n in graph if n.module and n.module.startswith(f"model.layers.{i}.") and n.op != "cache"] for i in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_names_and_sources(recognized):
    graph = recognized(built(LLAMA))
    node = graph["model.layers.1.mlp.down_proj"]
    assert node.op == "linear" and "llama.py" in node.source and node.module == "model.layers.1.mlp.down_proj"
    assert graph["model.layers.0.input_layernorm.rms_norm"].inputs[0] == "model.embed_tokens"
    assert graph.meta["vocab"] == 40 and graph.meta["hidden"] == 32 and graph.meta["capacity"] == 20


def test_half_precision_weights_keep_their_dtype():
    graph = recognize(trace(built(LLAMA).to(torch.bfloat16)))
    assert graph["model.layers.0.mlp.down_proj.weight"].type.dtype == "bf16"
    assert graph["model.layers.0.mlp.down_proj"].type.dtype == "fp32"
    assert graph.tables["rope.cos"].dtype == "float32"
    assert graph["model.layers.0.self_attn.cache.k"].type.dtype == "bf16"


@pytest.mark.slow
def test_llama_8b_without_weights_in_seconds():
    shape = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "num_hidden_layers": 32, "max_position_embeddings": 4096, "rope_theta": 500000.0,
    }  # fmt: skip
    with torch.device("meta"):
        model = build_model({**LLAMA, **shape}, 4096).to(torch.bfloat16)
    tensor_graph = trace(model)
    start = time.process_time()
    graph = recognize(tensor_graph)
    assert time.process_time() - start < 10
    assert graph.tables["rope.cos"].shape == (4096, 64)
    assert len([n for n in graph if n.op == "attention"]) == 32
