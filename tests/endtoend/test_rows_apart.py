"""Models compiled for a target that wants sums over lanes made by stages of their own."""

import pytest
from against_torch import assert_agrees, compile_quickly, random_model, target_facts

from kogc.dump import program_text
from kogc.inspect import summarize
from kogc.ir.draw import draw

pytestmark = pytest.mark.compiler

#: Four sums of two early layers, then delayed ones, which were never read whole; a head that means normed lanes.
CONFIG = {
    "model_type": "laneformer", "num_lanes": 2, "hidden_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 20, "vocab_size": 53, "max_position_embeddings": 64,
    "broadcast_delay": 2, "use_early_comm": True, "lm_head_type": "replicate",
}  # fmt: skip
FOUR_LANES = {**CONFIG, "num_lanes": 4, "hidden_size": 13}
BOTH = {"rows_words": 0, "combine_words": 0}
ROWS = {"rows_words": 0}
CAPACITY = 24

#: Changed facts, and how many stages then sum or norm lanes.
CASES = [
    ("one worker", CONFIG, ROWS, 6, "fp32", 1),
    ("a worker each", CONFIG, ROWS, 6, "bf16", 2),
    ("lanes that share a worker", CONFIG, ROWS, 6, "fp32", 3),
    ("four lanes and splits", FOUR_LANES, BOTH, 6, "fp32", 3),
    ("four lanes, one worker", FOUR_LANES, BOTH, 6, "bf16", 1),
    ("delayed sums only", {**CONFIG, "use_early_comm": False}, ROWS, 2, "fp32", 2),
    ("early sums in a loop", {**CONFIG, "num_hidden_layers": 5, "broadcast_delay": 4, "replicated_rmsn_scale": False}, BOTH, 10, "fp16", 3),
    ("a norm behind the sum", {**FOUR_LANES, "pre_norm_lane_agg": True}, ROWS, 5, "fp32", 3),
    ("a head that joins lanes", {**CONFIG, "lm_head_type": "lane"}, ROWS, 4, "fp32", 3),
    ("a head that sums and norms each lane", {**FOUR_LANES, "broadcast_delay": 3, "replicated_rmsn_scale": False}, ROWS, 5, "fp32", 3),
]  # fmt: skip


#: The others are left to `.ci/run`.
PLAIN = {"lanes that share a worker", "four lanes and splits"}


@pytest.mark.parametrize(
    "config, changes, count, dtype, workers",
    [pytest.param(*case[1:], id=case[0], marks=() if case[0] in PLAIN else pytest.mark.full) for case in CASES],
)
def test_logits_tokens_and_stages_agree_with_torch(tmp_path, config, changes, count, dtype, workers):
    module = random_model(config, CAPACITY, dtype)
    with target_facts(**changes):
        artifact = compile_quickly(module, tmp_path, dtype=dtype, workers=workers)
    with artifact:
        checks = assert_agrees(artifact, module, CAPACITY, dtype)
        kinds = {kind: [stage.name for *_, stage in artifact.program.instances() if stage.kind == kind] for kind in ("rows", "combine")}
        assert len(kinds["rows"]) == count and len(kinds["combine"]) == ("combine_words" in changes) * config["num_hidden_layers"]
        assert {name for names in kinds.values() for name in names} <= {check.stage for check in checks}


@pytest.mark.parametrize(
    ("config", "ranks"), [({**FOUR_LANES, "vocab_size": 52}, 2), pytest.param({**FOUR_LANES, "pre_norm_lane_agg": True}, 4, marks=pytest.mark.full)]
)
def test_every_rank_makes_its_own_sums(tmp_path, config, ranks):
    module = random_model(config, CAPACITY)
    with target_facts(**BOTH):
        artifact = compile_quickly(module, tmp_path, workers=2, tp=ranks)
    with artifact:
        assert_agrees(artifact, module, CAPACITY, "fp32")
        assert "w.launch->rank" in next(text for text in artifact.source.split("DEVICE_STAGE") if "stage_lm_head(Worker" in text)


def test_one_exchange_more_for_every_sum_is_reported_and_drawn(tmp_path):
    module = random_model(CONFIG, CAPACITY)
    with target_facts(rows_words=0), compile_quickly(module, tmp_path, workers=3, weights=False) as artifact:
        rows = {row.name: row for row in summarize(artifact).stages if row.kind == "rows"}
        assert "lm_head, lanes brought together" in draw(artifact.program)
        assert "stage lm_head_normed (rows, 2 lanes): lm_head, lanes normed" in program_text(artifact.program)
    assert (rows["lm_head_mean"].waits_for, rows["lm_head_mean"].bytes) == (("normed",), 0)


def test_lanes_within_the_bound_are_read_whole(tmp_path):
    with target_facts(rows_words=2 * 37), compile_quickly(random_model(CONFIG, CAPACITY), tmp_path, workers=2, weights=False) as artifact:
        assert all(stage.kind != "rows" for *_, stage in artifact.program.instances())
