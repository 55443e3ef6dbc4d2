"""Models compiled for a target that wants the splits of attention brought together by stages of their own."""

import pytest
from against_torch import assert_agrees, compile_quickly, random_model, target_facts

from kogc.dump import program_text
from kogc.inspect import summarize
from kogc.ir.draw import draw

pytestmark = pytest.mark.compiler

LLAMA = {
    "model_type": "llama", "hidden_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 29, "vocab_size": 53, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": False,
}  # fmt: skip
LANEFORMER = {
    "model_type": "laneformer", "num_lanes": 2, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 22, "intermediate_size": 20, "vocab_size": 54, "max_position_embeddings": 64,
    "broadcast_delay": 1, "use_early_comm": True, "lm_head_type": "replicate",
}  # fmt: skip
CAPACITY = 24

CASES = [
    ("GQA, one worker", LLAMA, "fp32", 1),
    ("GQA, two workers", LLAMA, "bf16", 2),
    ("GQA, more workers than tiles of a head", LLAMA, "fp32", 5),
    ("a head of its own for every query", {**LLAMA, "num_key_value_heads": 6, "head_dim": 16}, "fp32", 5),
    ("lanes, one worker", LANEFORMER, "bf16", 1),
    ("lanes, a worker each", LANEFORMER, "fp32", 2),
    ("lanes that share a worker", LANEFORMER, "bf16", 5),
]


#: The others are left to `.ci/run`.
PLAIN = {"GQA, two workers", "a head of its own for every query", "lanes that share a worker"}


@pytest.mark.parametrize(
    "config, dtype, workers", [pytest.param(*case[1:], id=case[0], marks=() if case[0] in PLAIN else pytest.mark.full) for case in CASES]
)
def test_logits_tokens_and_stages_agree_with_torch(tmp_path, config, dtype, workers):
    module = random_model(config, CAPACITY, dtype)
    with target_facts(combine_words=0):
        artifact = compile_quickly(module, tmp_path, dtype=dtype, workers=workers)
    with artifact:
        checks = assert_agrees(artifact, module, CAPACITY, dtype)
        combines = [stage.name for *_, stage in artifact.program.instances() if stage.kind == "combine"]
        assert len(combines) == config["num_hidden_layers"] and set(combines) <= {check.stage for check in checks}


def test_one_exchange_more_a_layer_is_reported_and_drawn(tmp_path):
    module = random_model(LLAMA, CAPACITY)
    apart, together = tmp_path / "apart", tmp_path / "together"
    apart.mkdir(), together.mkdir()
    with compile_quickly(module, together, workers=3, weights=False) as artifact:
        before = summarize(artifact)
    with target_facts(combine_words=0), compile_quickly(module, apart, workers=3, weights=False) as artifact:
        after = summarize(artifact)
        assert "self_attn: attention, splits combined" in draw(artifact.program)
        assert "combines 3 splits of 6 heads of 10 in partials" in program_text(artifact.program)
    assert after.exchanges_per_layer == before.exchanges_per_layer + 1
    (row,) = [row for row in after.stages if row.kind == "combine"]
    assert (row.name, row.waits_for, row.bytes) == ("self_attn_combine", ("partials",), 0)


def test_partials_within_the_bound_stay_where_they_are(tmp_path):
    with target_facts(combine_words=1 << 20), compile_quickly(random_model(LLAMA, CAPACITY), tmp_path, workers=2, weights=False) as artifact:
        assert all(stage.kind != "combine" for *_, stage in artifact.program.instances())
