"""Fuse: five stages a layer, each value placed where its last exchange allows, and never seen before it is published."""

from dataclasses import replace

import numpy as np
import pytest
from decode_builder import Graphs, laneformer, llama
from plan_check import TOKENS, assert_levels_agree, expected_logits, plan_logits

from kogc.ir.graph import GraphError
from kogc.ir.interpret import interpret, zero_caches
from kogc.ir.passes.fuse import fuse, set_splits
from kogc.ir.passes.fuse_interpret import check_plan, interpret_plan
from kogc.ir.verify import verify


def ops(plan, names):
    return [plan.graph[name].op for name in names]


def stage(plan, name, layer=None):
    return next(s for s in plan.stages if s.name == name and s.layer == layer)


# ── the cut ──


@pytest.mark.parametrize("layers", [1, 4])
def test_llama_has_five_stages_a_layer(layers):
    names = [s.name for s in fuse(llama(layers=layers).graph).stages]
    layer = ["self_attn_q_k_v_proj", "self_attn_attend", "self_attn_o_proj", "mlp_gate_up_proj", "mlp_down_proj"]
    assert names == ["embed_tokens", *layer * layers, "lm_head", "sample"]


def test_laneformer_has_five_stages_a_layer():
    names = [s.name for s in fuse(laneformer(layers=2, early=True).graph).stages]
    layer = ["attention_wq_wk_wv", "attention_attend", "attention_wo", "feed_forward_w1_w3", "feed_forward_w2"]
    assert names == ["tok_embeddings", *layer * 2, "lm_head", "sample"]


def test_stages_know_module_layer_and_title():
    qkv = fuse(llama().graph).stages[6]
    assert (qkv.block, qkv.layer, qkv.title) == ("self_attn", "layers.1", "self_attn: q_proj, k_proj, v_proj")


def test_roles_of_a_llama_layer():
    plan = fuse(llama(bias=True).graph)
    qkv, attend, out, gate_up, _ = plan.stages[1:6]
    assert ops(plan, qkv.prologue) == ["rms_norm"]
    assert [ops(plan, part.epilogue) for part in qkv.parts] == [["rope"], ["rope", "kv_append"], ["kv_append"]]
    assert [ops(plan, part.outputs) for part in qkv.parts] == [["rope"], ["kv_append"], ["kv_append"]]
    assert plan.graph[attend.core].op == "attention_partial"
    assert ops(plan, out.prologue) == ["attention_combine"]
    assert ops(plan, out.parts[0].epilogue) == ["add"]
    assert len(gate_up.parts) == 1
    assert len(gate_up.parts[0].linears) == 2
    assert ops(plan, gate_up.parts[0].epilogue) == ["gated_activation"]


def test_normed_block_outputs_still_make_five_stages_a_layer():
    plan = fuse(llama(layers=3, post_norm=True).graph)
    assert len(plan.stages) == 1 + 5 * 3 + 2
    gate_up = plan.stages[4]
    assert ops(plan, gate_up.prologue) == ["rms_norm", "add", "rms_norm"]
    assert ops(plan, gate_up.prologue_outputs) == ["add"]


def test_slices_of_one_weight_are_parts_of_one_stage():
    plan = fuse(llama(fused_qkv=True).graph)
    assert plan.stages[1].name == "self_attn_qkv_proj"
    assert len(plan.stages[1].parts) == 3


def test_a_block_beside_attention_joins_its_first_stage():
    names = [s.name for s in fuse(llama(layers=1, parallel=True).graph).stages]
    assert names[1:5] == ["self_attn_q_k_v_proj_mlp_gate_up_proj", "self_attn_attend", "self_attn_o_proj", "mlp_down_proj"]


def test_a_tied_head_is_not_called_after_the_embedding():
    assert [s.name for s in fuse(llama(tied=True).graph).stages][-2:] == ["lm_head", "sample"]


def test_the_embedding_is_spread_over_lanes_in_its_own_stage():
    plan = fuse(laneformer().graph)
    assert ops(plan, plan.stages[0].parts[0].epilogue) == ["lane_broadcast"]


def test_a_delayed_sum_lands_in_the_epilogue():
    plan = fuse(laneformer(delay=1).graph)
    out = stage(plan, "attention_wo", "layers.2")
    assert sorted(ops(plan, out.parts[0].epilogue)) == ["add", "add", "lane_others"]
    assert ops(plan, out.parts[0].outputs) == ["linear", "add"]
    assert ops(plan, out.prologue) == ["attention_combine"]


def test_outputs_that_nobody_waits_for_stay_in_their_stage():
    plan = fuse(laneformer(delay=1).graph)
    last = stage(plan, "attention_wo", "layers.3")
    assert ops(plan, last.parts[0].outputs) == ["add"]


def test_a_blocking_sum_is_made_by_the_next_stage_and_published_there():
    plan = fuse(laneformer(delay=1, early=True).graph)
    out, gate_up = stage(plan, "attention_wo", "layers.0"), stage(plan, "feed_forward_w1_w3", "layers.0")
    assert ops(plan, out.parts[0].epilogue) == []
    assert ops(plan, gate_up.prologue) == ["lane_sum", "lane_broadcast", "add", "rms_norm"]
    assert ops(plan, gate_up.prologue_outputs) == ["add"]


@pytest.mark.parametrize(
    ("head", "prologue", "epilogue"),
    [
        ("replicate", ["rms_norm", "lane_mean"], []),
        ("lane", ["rms_norm", "lane_concat"], []),
        ("vocab_parallel", ["rms_norm"], ["lane_concat"]),
        ("pre_norm_lane_agg", ["lane_sum", "rms_norm"], []),
    ],
)
def test_head_types(head, prologue, epilogue):
    plan = fuse(laneformer(head=head).graph)
    stage = plan.stages[-2]
    assert ops(plan, stage.prologue) == prologue
    assert ops(plan, stage.parts[0].epilogue) == epilogue


def test_an_epilogue_reads_its_rows_of_a_value_its_own_prologue_made():
    built = Graphs.summed_linear()
    plan = fuse(built.graph)
    block = plan.stages[2]
    assert ops(plan, block.prologue) == ["lane_sum", "lane_broadcast", "add", "rms_norm"]
    assert ops(plan, block.parts[0].epilogue) == ["add"]
    assert_levels_agree(built)


# ── rows of vectors that were made before ──


@pytest.mark.parametrize("qk_norm", ["head", "whole"])
def test_normed_queries_and_keys_share_a_stage_before_attention(qk_norm):
    plan = fuse(llama(qk_norm=qk_norm).graph)
    names = [s.name for s in plan.stages[1:4]]
    assert names == ["self_attn_q_k_v_proj", "self_attn_q_k_norm", "self_attn_attend"]
    qkv, rows, _ = plan.stages[1:4]
    assert [ops(plan, part.epilogue) for part in qkv.parts] == [[], [], ["kv_append"]]
    assert (rows.kind, ops(plan, rows.prologue)) == ("rows", ["rms_norm", "rms_norm"])
    assert [ops(plan, part.epilogue) for part in rows.parts] == [["rope", "kv_append"], ["rope"]]
    assert [ops(plan, part.outputs) for part in rows.parts] == [["kv_append"], ["rope"]]


def test_what_is_only_normed_is_handed_on_by_its_part():
    plan = fuse(llama(qk_norm="head", positions=True).graph)
    rows = plan.stages[2]
    assert rows.prologue_outputs == ()
    assert [ops(plan, part.epilogue) for part in rows.parts] == [["kv_append"], []]
    assert [ops(plan, part.outputs) for part in rows.parts] == [["kv_append"], ["rms_norm"]]


def test_one_normed_vector_is_enough_for_a_stage():
    for normed in ("normed_query", "normed_key"):
        built = getattr(Graphs, normed)()
        assert [s.kind for s in fuse(built.graph).stages] == ["embed", "matvec", "rows", "attention", "matvec", "sample"]
        assert_levels_agree(built, step_tokens=3, splits=2)


def test_learned_positions_are_added_where_the_token_is_looked_up():
    plan = fuse(llama(positions=True).graph)
    assert ops(plan, plan.stages[0].parts[0].epilogue) == ["embed", "add"]


# ── meaning ──


@pytest.mark.parametrize("step_tokens", [1, 3])
def test_a_plan_gives_the_logits_and_caches_of_its_graph(step_tokens):
    built = llama(bias=True, windows={1: 3}, rotary_dim=4, softcap=5.0)
    np.testing.assert_allclose(plan_logits(fuse(built.graph, 2), built, step_tokens), expected_logits(built), atol=1e-9)


def test_the_step_result_has_logits_next_token_and_caches():
    built = laneformer()
    plan = fuse(built.graph)
    where = np.arange(len(TOKENS))
    found = interpret_plan(plan, TOKENS, where, built.weights, zero_caches(plan.graph))
    expected = interpret(built.graph, TOKENS, where, built.weights, zero_caches(built.graph))
    assert found.values[plan.graph.outputs[1]].tolist() == expected.output.argmax(-1).tolist()
    for key, cache in expected.caches.items():
        np.testing.assert_allclose(found.caches[key], cache, atol=1e-9)


def test_set_splits_changes_types_and_keeps_the_logits():
    built = laneformer(windows={0: 4})
    plan = fuse(built.graph)
    cut = set_splits(plan, 5)
    assert cut.stages == plan.stages
    core = next(s.core for s in cut.stages if s.kind == "attention")
    assert cut.graph[core].type.shape == ("T", 2, 2 * 5 * (6 + 2))
    verify(cut.graph)
    np.testing.assert_allclose(plan_logits(cut, built, 2), expected_logits(built), atol=1e-9)
    with pytest.raises(ValueError, match="at least 1"):
        set_splits(plan, 0)


def test_a_stage_cannot_see_what_was_not_published():
    plan = fuse(llama(layers=1).graph)
    qkv = plan.stages[1]
    silent = replace(qkv, parts=(replace(qkv.parts[0], outputs=()), *qkv.parts[1:]))
    broken = replace(plan, stages=(plan.stages[0], silent, *plan.stages[2:]))
    with pytest.raises(GraphError, match=r"stage 2 \(self_attn_attend\).*no earlier stage published"):
        check_plan(broken)


def test_a_plan_computes_every_node_once():
    plan = fuse(llama(layers=1).graph)
    with pytest.raises(GraphError, match=r"stage 8 \(embed_tokens\) computes embed_\w+ \(embed\) again"):
        check_plan(replace(plan, stages=(*plan.stages, plan.stages[0])))
    with pytest.raises(GraphError, match="no stage computes"):
        check_plan(replace(plan, stages=plan.stages[:-1]))


# ── what stages cannot express yet ──


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Graphs.turned_twice, r"rope_\w+ \(rope\) is not supported yet: a vector is turned twice.*model.py"),
        (Graphs.normed_position, r"embed_\w+ \(embed\) is not supported yet: rows by position can only be added.*model.py"),
        (Graphs.normed_logits, r"sample.*not supported yet: logits rms_norm_\w+ .*model.py"),
    ],
)
def test_unsupported_placements_name_op_and_source(graph, message):
    with pytest.raises(GraphError, match=message):
        fuse(graph().graph)
