"""`kogc explain`: what is recognised, what will be fused, what is not supported and where; no weights are needed."""

import json
from pathlib import Path

import pytest

from kogc.explain import explain
from kogc.targets import target_facts

WINDOWED = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": 9, "dtype": "bfloat16",
}  # fmt: skip
#: Elements of the projections and the MLP of one layer.
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32


def folder(path: Path, config: dict) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def windowed(tmp_path) -> Path:
    return folder(tmp_path / "windowed", WINDOWED)


def test_layers_that_are_alike_are_told_once(kogc, windowed):
    found = json.loads(kogc("explain", windowed, "--json").out)
    assert (found["schema"], found["supported"], found["problems"], found["dtype"], found["context"]) == (1, True, [], "bf16", 64)
    names = [(group["name"], group["count"]) for group in found["layers"]]
    assert names == [("embed_tokens", 1), ("layers 0–2", 3), ("lm_head", 1), ("sample", 1)]
    layer = found["layers"][1]
    assert layer["recognised"] == {"rms_norm": 2, "linear": 7, "rope": 2, "kv_append": 2, "attention": 1, "add": 2, "gated_activation": 1}
    qkv, attend = layer["stages"][:2]
    assert (qkv["first"], qkv["products"], qkv["then"]) == (["rms_norm"], [[32, 32], [16, 32], [16, 32]], ["rope", "rope", "kv_append", "kv_append"])
    assert attend["detail"] == "4 / 2 heads of 8, window 9"
    assert sum(stage["bytes"] for stage in layer["stages"]) == 2 * LAYER


def test_bytes_and_predictions(kogc, windowed):
    found = json.loads(kogc("explain", windowed, "--json", "--position", "40").out)
    head, norms = 96 * 32, 7 * 32
    assert found["parameters"] == 2 * head + norms + 3 * LAYER
    assert found["traffic"] == {"weights": 2 * (32 + 3 * LAYER + head), "kv": 2 * 3 * 2 * 2 * 8 * 9}
    for one in found["predictions"]:
        assert one["bandwidth_gb_s"] == target_facts(one["target"])["bandwidth_gb_s"]
        assert one["tok_s"] == pytest.approx(one["bandwidth_gb_s"] * 1e9 / sum(found["traffic"].values()))
    assert {one["target"] for one in found["predictions"]} == {"cpu", "h200"}
    longer = json.loads(kogc("explain", windowed, "--json", "--dtype", "fp32", "--position", "3").out)
    assert longer["traffic"]["weights"] == 2 * found["traffic"]["weights"] and longer["traffic"]["kv"] == 4 * 3 * 2 * 2 * 8 * 4


def test_as_text(kogc, windowed):
    outcome = kogc("explain", windowed)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "windowed: 34 k parameters, 68 kB in bf16, 64 positions"
    assert "layers 0–2   3 times" in lines
    assert any(line.startswith("  matvec         self_attn_q_k_v_proj: rms_norm → 32×32, 16×32, 16×32 → rope → kv_append") for line in lines)
    assert any(line.startswith("predicted        ") and "at most on h200" in line for line in lines)


def test_what_is_not_supported_is_named_with_its_line_and_all_of_it(kogc, tmp_path):
    experts = {**WINDOWED, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "sliding_window": None}
    path = folder(tmp_path / "experts", experts)
    outcome = kogc("explain", path)
    assert outcome.code == 2
    assert "not supported    aten.softmax in module model.layers.0.mlp.gate, 3 times" in outcome.out
    assert "modeling_mixtral.py:" in outcome.out and "predicted" not in outcome.out
    found = json.loads(kogc("explain", path, "--json").out)
    assert not found["supported"] and found["layers"] == [] and found["traffic"] is None
    assert [(problem["op"], problem["count"]) for problem in found["problems"]] == [("aten.softmax", 3)]


def test_a_graph_that_no_stage_can_run_is_one_problem():
    from decode_problem import NormedLogits

    found = explain(NormedLogits())
    assert [problem.op for problem in found.problems] == [""] and "sample" in found.problems[0].why


def test_presets_and_files(kogc, tiny_pt):
    assert "layers" in kogc("explain", tiny_pt).out
    assert kogc("explain", "preset:llama-tiny", "--max-context", "32").code == 0


def test_a_missing_model_is_bad_input(kogc, tmp_path):
    outcome = kogc("explain", tmp_path / "absent")
    assert outcome.code == 2 and "absent" in outcome.line


def test_without_weights_only_the_code_compiles(kogc, windowed, tmp_path):
    refused = kogc("compile", windowed, "-o", tmp_path / "x.kog")
    assert refused.code == 2 and "has no weights" in refused.line
    assert kogc("compile", windowed, "-o", tmp_path / "x.kog", "--no-weights").code == 0
    assert kogc("compile", windowed, "-o", tmp_path / "y.kog", "--random-weights").code == 0
