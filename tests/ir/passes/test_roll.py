"""Roll: loops whose code does not grow with depth, numbered buffer writes, and the same logits on real slots."""

from dataclasses import replace

import numpy as np
import pytest
from decode_builder import Model, build, laneformer, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_check import TOKENS, assert_levels_agree, caches_after, expected_logits, rolled

from kogc.ir.graph import GraphError
from kogc.ir.passes.fuse import fuse
from kogc.ir.passes.roll import roll
from kogc.ir.passes.roll_interpret import ProgramError, ProgramRun, interpret_program
from kogc.ir.program import Affine, Program, unit_rows


def shape_of(program: Program):
    return [(segment.name, segment.count, len(segment.stages)) for segment in program.segments]


def without_tables(program: Program):
    """Every stage without its per-iteration tables: what code is generated from."""
    stages = []
    for stage in (stage for segment in program.segments for stage in segment.stages):
        operands = tuple(replace(o, write=Affine(0, o.write.stride)) for o in stage.operands)
        parts = tuple(replace(p, matrices=(), outputs=()) for p in stage.parts)
        attention = stage.attention and replace(stage.attention, caches=(), windows=(), output=None)
        stages.append(replace(stage, operands=operands, consts=(), parts=parts, attention=attention))
    return stages


# ── loops ──


def test_a_deep_model_needs_no_more_code_than_a_shallow_one():
    shallow, deep = rolled(llama(layers=4)), rolled(llama(layers=32))
    assert shape_of(shallow) == [("embed_tokens", 1, 1), ("layers_0_3", 4, 5), ("lm_head", 1, 2)]
    assert shape_of(deep) == [("embed_tokens", 1, 1), ("layers_0_31", 32, 5), ("lm_head", 1, 2)]
    assert without_tables(shallow) == without_tables(deep)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_delayed_model_is_a_loop_before_and_a_loop_after_the_first_landing(delay):
    for layers in (delay + 2, 15):
        spans = shape_of(rolled(laneformer(layers=layers, delay=delay)))
        first = "layers_0" if delay == 1 else f"layers_0_{delay - 1}"
        late = (f"layers_{delay}_{layers - 1}", layers - delay, 5)
        assert spans == [("tok_embeddings", 1, 1), (first, delay, 5), late, ("lm_head", 1, 2)]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_blocking_sums_at_the_start_cost_a_bounded_amount_of_code(delay):
    sizes = [sum(len(s.stages) for s in rolled(laneformer(layers=n, delay=delay, early=True)).segments) for n in (6, 15)]
    assert sizes[0] == sizes[1] <= 18


def test_windows_are_a_table_of_the_loop():
    program = rolled(llama(layers=4, windows={0: 3, 2: 5}))
    core = program.segments[1].stages[1].attention
    assert core.windows == (3, 0, 5, 0)
    assert core.caches[2] == ("layers.2.k", "layers.2.v")


def test_names_are_unique_where_they_must_be():
    program = rolled(laneformer(layers=6, early=True, delay=2))
    assert len({s.name for s in program.segments}) == len(program.segments)
    assert len({b.name for b in program.buffers}) == len(program.buffers)
    for segment in program.segments:
        assert len({s.name for s in segment.stages}) == len(segment.stages)
        for stage in segment.stages:
            names = [o.name for o in stage.operands] + [c.name for c in stage.consts] + [s.name for s in stage.prologue]
            names += [s.name for part in stage.parts for s in part.epilogue]
            assert len(set(names)) == len(names)


# ── buffers ──


def test_a_carried_residual_is_one_buffer():
    program = rolled(llama(layers=4))
    qkv, down = program.segments[1].stages[0], program.segments[1].stages[4]
    assert (qkv.operands[0].buffer, qkv.operands[0].write) == ("x", Affine(0, 1))
    assert (down.parts[0].outputs[0].buffer, down.parts[0].outputs[0].write) == ("x", Affine(1, 1))
    assert program.buffer("x").writes_per_step == 5
    assert program.segments[2].stages[0].operands[0].write == Affine(4)


def test_a_delayed_sum_is_a_read_of_an_earlier_write():
    program = rolled(laneformer(layers=6, delay=2))
    out = program.segments[2].stages[2]
    past = next(o for o in out.operands if o.access == "rows_all_lanes")
    own = next(o for o in out.parts[0].outputs if o.value == "dot0")
    assert past.buffer == own.buffer
    assert (past.write, own.write) == (Affine(0, 1), Affine(2, 1))
    assert program.buffer(past.buffer).slots >= 2 + 2


def test_a_loop_publishes_what_any_of_its_iterations_needs_published():
    program = rolled(laneformer(layers=6, delay=1))
    assert program.buffer("attention_wo").writes_per_step == 6


def test_buffers_stay_in_the_lane_unless_somebody_reads_across():
    scopes = {b.name: b.scope for b in rolled(laneformer(delay=1)).buffers}
    assert scopes["q"] == scopes["act"] == scopes["partials"] == scopes["kv_keys"] == scopes["x_attention"] == "group"
    assert scopes["x"] == scopes["attention_wo"] == scopes["best"] == "grid"
    assert {b.scope for b in rolled(llama()).buffers} == {"grid"}


def test_payloads_and_widths():
    buffers = {b.name: (b.payload, b.lanes, b.width) for b in rolled(laneformer(lanes=2), splits=3).buffers}
    assert buffers["partials"] == ("partials", 2, 2 * 3 * (6 + 2))
    assert buffers["kv_keys"] == ("cache", 2, 6)
    assert buffers["x"] == ("vector", 2, 16)
    assert buffers["act"] == ("vector", 2, 10)
    assert buffers["best"] == ("best", 1, 1)


# ── stages ──


def test_parts_of_the_first_stage():
    q, k, v = rolled(llama(bias=True)).segments[1].stages[0].parts
    assert [part.unit for part in (q, k, v)] == ["rope", "rope", "row"]
    assert [spec.op for spec in q.epilogue] == ["add", "rope"]
    assert q.epilogue[0].inputs[0] == "dot0"
    assert q.epilogue[1].inputs[-1] == "position"
    assert q.rope == {"style": "half", "head_dim": 6, "rotary_dim": 6}
    assert (k.outputs[0].kind, k.outputs[0].buffer, k.outputs[0].caches[1]) == ("cache", "kv_keys", "layers.1.k")
    assert (v.outputs[0].kind, v.outputs[0].buffer, v.outputs[0].value) == ("cache", "kv_values", v.epilogue[0].name)


def test_slices_of_one_weight_name_their_first_row():
    parts = rolled(llama(fused_qkv=True)).segments[1].stages[0].parts
    assert [(p.matrices[0].rows_from, p.matrices[0].rows) for p in parts] == [(0, 24), (24, 12), (36, 12)]


def test_accesses_of_a_delayed_stage():
    stage = rolled(laneformer(delay=1)).segments[2].stages[2]
    assert {o.buffer: o.access for o in stage.operands} == {"partials": "lane", "attention_wo": "rows_all_lanes", "x": "rows"}


def test_a_head_over_all_lanes_reads_all_of_them():
    head = rolled(laneformer(head="replicate")).segments[-1].stages[0]
    assert [o.access for o in head.operands] == ["all_lanes"]
    assert [(spec.op, spec.scope, spec.lanes) for spec in head.prologue] == [("rms_norm", "all", 2), ("lane_mean", "all", 1)]


def test_a_vocabulary_slice_per_lane_reads_its_own_lane():
    head, sample = rolled(laneformer(head="vocab_parallel")).segments[-1].stages
    assert (head.lanes, head.operands[0].access, head.prologue[0].scope) == (2, "lane", "own")
    assert head.parts[0].epilogue == ()
    assert (head.parts[0].outputs[0].kind, head.parts[0].matrices[0].rows) == ("logits", 12)
    assert sample.operands[0].access == "best"


def test_constants_hold_one_key_per_iteration_or_one_for_all():
    consts = {c.name: c for c in rolled(laneformer(lane_norms=True, layers=3, delay=1)).segments[2].stages[0].consts}
    scale, cos = consts["rms_norm_scale"], consts["rope_cos"]
    assert (scale.lanes, scale.shape, len(scale.keys)) == (2, (16,), 2)
    assert (cos.lanes, cos.shape, cos.keys) == (1, (24, 3), ("cos",))


@pytest.mark.parametrize("tile_rows", [1, 4, 5])
def test_units_cover_every_row_once(tile_rows):
    for part in rolled(llama(rotary_dim=4)).segments[1].stages[0].parts:
        rows = np.concatenate([unit_rows(part, tile_rows, u).ravel() for u in range(part.units(tile_rows))])
        assert sorted(rows[rows >= 0]) == list(range(part.rows))


def test_facts_of_the_program():
    meta = rolled(llama(layers=2), dtype="fp16").meta
    per_layer = 16 * (24 + 12 + 12) + 24 * 16 + 3 * 16 * 20
    assert meta["weight_bytes"] == 2 * (2 * per_layer + 24 * 16)
    assert (meta["layers"], meta["hidden"], meta["stages"], meta["kv_bytes_per_position"]) == (2, 16, 13, 2 * 2 * 12 * 2)


# ── meaning ──


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("early", [False, True])
def test_delays(delay, early):
    assert_levels_agree(laneformer(layers=5, delay=delay, early=early, windows={0: 3}))


@pytest.mark.parametrize("delay", [4, 7])
@pytest.mark.parametrize("early", [False, True])
def test_delays_as_long_as_the_model(delay, early):
    assert_levels_agree(laneformer(layers=4, delay=delay, early=early))


@pytest.mark.parametrize("head", ["replicate", "lane", "vocab_parallel", "pre_norm_lane_agg"])
@pytest.mark.parametrize("early", [False, True])
def test_heads(head, early):
    lane_norms = head != "pre_norm_lane_agg"
    assert_levels_agree(laneformer(head=head, early=early, lane_norms=lane_norms, softcap=4.0), splits=2)


@pytest.mark.parametrize(("attention", "mlp"), [(False, True), (True, False), (False, False)])
def test_blocks_without_communication(attention, mlp):
    assert_levels_agree(laneformer(attention_comm=attention, mlp_comm=mlp, early=mlp))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "tied": True, "windows": {0: 3, 2: 4}, "layers": 6},
        {"rotary_dim": 4, "style": "interleaved", "gated": False, "embed_scale": 4.0},
        {"fused_qkv": True, "parallel": True},
        {"layers": 1},
        {"post_norm": True, "layers": 4},
        {"qk_norm": "head", "bias": True, "windows": {1: 3}, "rotary_dim": 4},
        {"qk_norm": "whole", "style": "interleaved", "post_norm": True},
        {"qk_norm": "head", "positions": True},
        {"positions": True, "embed_scale": 2.0},
    ],
)
def test_llama_options(options):
    assert_levels_agree(llama(**options), step_tokens=3, splits=2)


@pytest.mark.parametrize("options", [{"lanes": 1, "early": True}, {"lanes": 3, "heads": 6, "kv_heads": 3, "ffn": 21}, {"parallel": True}, {"qk_norm": "head"}, {"qk_norm": "whole"}])
def test_laneformer_shapes(options):
    assert_levels_agree(laneformer(bias=True, **options))


def test_caches_hold_what_the_graph_holds():
    built = laneformer()
    run = ProgramRun(rolled(built), built.weights, built.graph.tables)
    for start in range(0, len(TOKENS), 2):
        part = TOKENS[start : start + 2]
        run.step(part, range(start, start + len(part)))
    for key, cache in caches_after(built).items():
        np.testing.assert_allclose(run.caches[key], cache, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_models(data):
    draw = data.draw
    lanes = draw(st.sampled_from([0, 0, 1, 2, 3, 4]), "lanes")
    wide = max(lanes, 1)
    layers = draw(st.integers(1, 6), "layers")
    kv_heads = wide * draw(st.integers(1, 2), "kv heads a lane")
    head_dim = draw(st.sampled_from([4, 6, 8]), "head_dim")
    model = Model(
        layers=layers, lanes=lanes, dim=draw(st.sampled_from([8, 13]), "dim"), kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3), "group"), head_dim=head_dim, ffn=wide * draw(st.sampled_from([5, 8]), "ffn"),
        delay=draw(st.integers(1, 3), "delay"), early=draw(st.booleans(), "early"),
        attention_comm=draw(st.booleans(), "attention"), mlp_comm=draw(st.booleans(), "mlp"),
        head=draw(st.sampled_from(["replicate", "lane", "vocab_parallel", "pre_norm_lane_agg"]), "head") if lanes else "replicate",
        windows=draw(st.dictionaries(st.integers(0, layers - 1), st.integers(1, 9)), "windows"),
        rotary_dim=draw(st.sampled_from([head_dim, 4]), "rotary"), style=draw(st.sampled_from(["half", "interleaved"]), "style"),
        bias=draw(st.booleans(), "bias"), gated=draw(st.booleans(), "gated"), parallel=draw(st.booleans(), "parallel"), post_norm=draw(st.booleans(), "post norm"),
        tied=draw(st.booleans(), "tied"), fused_qkv=draw(st.booleans(), "fused"),
        qk_norm=draw(st.sampled_from(["", "", "head", "whole"]), "qk norm"), positions=draw(st.booleans(), "positions"),
    )  # fmt: skip
    assert_levels_agree(build(model), step_tokens=draw(st.integers(1, 4), "step"), splits=draw(st.integers(1, 3), "splits"))


# ── the oracle sees faults ──


def test_too_few_slots_are_noticed():
    built = laneformer(delay=2, layers=5)
    program = rolled(built)
    narrow = replace(program, buffers=tuple(replace(b, slots=1) if b.name == "attention_wo" else b for b in program.buffers))
    with pytest.raises(ProgramError, match=r"reads write \d+ of attention_wo, slot 0 holds write \d+"):
        interpret_program(narrow, built.weights, built.graph.tables, TOKENS)


def test_a_read_before_the_write_is_noticed():
    built = llama(layers=2)
    program = rolled(built)
    loop = program.segments[1]
    down = loop.stages[4]
    late = replace(down, operands=tuple(replace(o, write=Affine(1, 1)) if o.buffer == "act" else o for o in down.operands))
    segment = replace(loop, stages=(*loop.stages[:4], late))
    broken = replace(program, segments=(program.segments[0], segment, program.segments[2]))
    with pytest.raises(ProgramError, match="slot 1 holds nothing"):
        interpret_program(broken, built.weights, built.graph.tables, TOKENS)


# ── bad requests ──


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"capacity": 25}, GraphError, "table cos ends at position 24, the capacity is 25"),
        ({"dtype": "int64"}, ValueError, "dtype is 'int64'"),
        ({"step_tokens": ()}, ValueError, "step_tokens"),
        ({"step_tokens": (0, 4)}, ValueError, "step_tokens"),
    ],
)
def test_bad_requests(changes, error, message):
    with pytest.raises(error, match=message):
        roll(fuse(llama().graph), **{"capacity": 24, "dtype": "fp32", **changes})


def test_a_shorter_context_than_the_tables_is_fine():
    built = llama()
    program = roll(fuse(built.graph), capacity=9, dtype="fp32")
    assert {cache.capacity for cache in program.caches} == {9}
    np.testing.assert_allclose(interpret_program(program, built.weights, built.graph.tables, TOKENS), expected_logits(built), atol=1e-9)
