"""Models without lanes, cut over ranks: the same logits on every level, two sums a layer, and clear words about what does not divide."""

from __future__ import annotations

import numpy as np
import pytest
from decode_builder import Built, Graphs, Model, _Builder, llama
from plan_check import assert_levels_agree, expected_logits
from rank_plans import dealt, sent

from kogc.ir.graph import Node
from kogc.ir.interpret import weight_part
from kogc.ir.passes.partition import PartitionError, partition
from kogc.ir.passes.views import ViewedWeights, separate_views, source_key
from kogc.ir.shards import shard_leaf
from kogc.ir.text import parse, to_text
from kogc.ir.types import TensorType
from kogc.ir.verify import verify

SIZES = dict(ffn=24, heads=4, kv_heads=2)
STYLES = [
    {}, {"bias": True}, {"tied": True}, {"parallel": True}, {"post_norm": True}, {"fused_qkv": True}, {"gated": False}, {"softcap": 3.0},
    {"embed_scale": 2.0}, {"vocab": 23}, {"rotary_dim": 4, "style": "interleaved"}, {"windows": {1: 3}},
]  # fmt: skip


def cut_over(model: Built, ranks: int) -> Built:
    viewed = separate_views(verify(partition(model.graph, ranks)))
    return Built(verify(viewed.graph), ViewedWeights(model.weights, viewed.leaves))


def assert_same(model: Built, ranks: int) -> Built:
    after = cut_over(model, ranks)
    np.testing.assert_allclose(expected_logits(after), expected_logits(model), atol=1e-12)
    assert_levels_agree(after)
    return after


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: " ".join(style) or "plain")
def test_a_cut_model_computes_the_same(style, ranks):
    assert_same(llama(**SIZES | style), ranks)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 1, 8), (8, 2, 8), (8, 8, 8), (6, 3, 3), (6, 1, 6)])
def test_key_and_value_heads_are_held_where_they_are_needed(heads, kv_heads, ranks):
    after = assert_same(llama(layers=2, ffn=24, heads=heads, kv_heads=kv_heads, head_dim=4), ranks)
    caches = [node for node in after.graph if node.op == "cache"]
    assert {cache.type.shape[0] for cache in caches} == {max(kv_heads, ranks)}


def test_a_block_between_norms_is_cut_although_no_residual_goes_around_it():
    make = _Builder(Model(), 0)
    x = make.start()
    hidden = make.op("activation", make.linear(make.norm(x, "first", laned=False), "a", 24, 16), fn="gelu")
    normed = make.norm(make.linear(hidden, "b", 16, 24), "second", laned=False)
    hidden = make.op("activation", make.linear(normed, "c", 24, 16), fn="gelu")
    assert_same(make.finish(make.op("add", x, make.linear(hidden, "d", 16, 24))), 2)


@pytest.mark.parametrize("style", [{}, {"parallel": True}, {"post_norm": True}, {"tied": True}])
def test_ranks_meet_in_two_sums_a_layer_and_in_the_choice_of_the_token(style):
    program, _ = dealt(cut_over(llama(**SIZES | style), 2), 2, 2)
    assert {name: masks for name, masks in sent(program).items() if any(masks)} == {
        "self_attn_o": [0b11] * 3, "mlp_down": [0b11] * 3, "best": [0b11],
    }  # fmt: skip


def test_a_rank_streams_its_share_of_every_matrix():
    whole, parts = llama(**SIZES).graph, cut_over(llama(**SIZES), 2).graph
    elements = lambda graph: sum(np.prod(graph[node.inputs[1]].type.shape) for node in graph if node.op == "linear")
    assert elements(whole) == elements(parts)
    assert {source_key(node) for node in parts if node.op == "weight"} == {node.attrs["key"] for node in whole if node.op == "weight"}


def test_shards_go_through_text():
    graph = partition(llama(**SIZES | {"bias": True, "fused_qkv": True}).graph, 2)
    assert to_text(parse(to_text(graph), graph.tables)) == to_text(graph)


# ── shards ──


def test_what_each_kind_of_shard_holds():
    matrix = np.arange(24.0).reshape(6, 4)
    leaf = Node("w", "weight", (), TensorType((6, 4), "fp32"), {"key": "w"})
    show = lambda *how: weight_part(shard_leaf(leaf, "s", *how), matrix)
    np.testing.assert_array_equal(show("rows", 2, (0, 6)), [matrix[:3], matrix[3:]])
    np.testing.assert_array_equal(show("rows", 2, (2, 6)), [matrix[2:4], matrix[4:]])
    np.testing.assert_array_equal(show("rows", 4, (0, 6), 2), [matrix[:3], matrix[:3], matrix[3:], matrix[3:]])
    np.testing.assert_array_equal(show("columns", 2, (1, 6)), [matrix[1:, :2], matrix[1:, 2:]])
    vector = Node("b", "weight", (), TensorType((6,), "fp32"), {"key": "b"})
    np.testing.assert_array_equal(weight_part(shard_leaf(vector, "s", "once", 3, (0, 6)), matrix[:, 0]), [matrix[:, 0], np.zeros(6), np.zeros(6)])
    turned = leaf.with_(attrs={"key": "w", "transpose": True})
    np.testing.assert_array_equal(weight_part(shard_leaf(turned, "s", "columns", 2, (0, 6)), matrix.T), show("columns", 2, (0, 6)))


# ── what does not divide ──


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"heads": 6, "kv_heads": 6}, 4, "4 ranks do not divide the 6 heads of llama; 1, 2, 3 or 6 would"),
        ({"heads": 12, "kv_heads": 4}, 6, "6 ranks do not divide the 4 key/value heads of llama; 1, 2, 4 or 12 would"),
        ({"ffn": 22}, 4, "4 ranks do not divide the 22 rows of model_layers_0_mlp_gate_proj_weight; 1 or 2 would"),
    ],
)
def test_what_does_not_divide_is_named_with_the_numbers_that_would(options, ranks, message):
    with pytest.raises(PartitionError, match=message):
        partition(llama(**SIZES | options).graph, ranks)


def test_a_query_that_is_normed_as_a_whole_is_named():
    with pytest.raises(PartitionError, match=r"one rank only: rms_norm_\d+ \(rms_norm\).* cannot be cut"):
        partition(Graphs.normed_query().graph, 2)


def test_an_op_that_cannot_be_cut_is_named_with_its_source():
    make = _Builder(Model(), 0)
    x = make.start()
    built = make.finish(make.op("lane_mean", make.op("lane_broadcast", x, lanes=3)))
    with pytest.raises(PartitionError, match=r"llama runs on one rank only: lane_broadcast_\d+ \(lane_broadcast\) \(at model.py:.*\) cannot be cut"):
        partition(built.graph, 2)
