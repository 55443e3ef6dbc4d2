"""Laneformers cut over cpu ranks, lane by lane: the logits of PyTorch, whatever the lanes exchange and when."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from against_torch import (
    LIMITS,
    assert_agrees,
    assert_equal_bits,
    compile_quickly,
    generated,
    logits_on_ranks,
    random_ids,
    random_model,
    relative_rmse,
)

from kogc.codegen.layout import make_layout
from kogc.ir.passes.partition import PartitionError

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

CAPACITY = 17
LANEFORMER: dict[str, Any] = {
    "model_type": "laneformer", "num_lanes": 4, "hidden_size": 37, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 10, "intermediate_size": 68, "vocab_size": 56, "max_position_embeddings": 64, "norm_eps": 1e-5, "rope_theta": 1e4,
    "broadcast_delay": 2, "use_early_comm": False, "use_attention_comm": True, "use_mlp_comm": True, "lm_head_type": "replicate",
    "pre_norm_lane_agg": False, "tie_word_embeddings": False, "replicated_rmsn_scale": True, "swa_layers": [1], "sliding_window": 7,
}  # fmt: skip

#: What the end of a model is, and what its lanes say to each other before.
HEADS = {
    "mean": {}, "sum before the norm": {"pre_norm_lane_agg": True}, "one wide head": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "a slice each": {"lm_head_type": "vocab_parallel"}, "tied": {"tie_word_embeddings": True},
}  # fmt: skip
SUMS = {
    "delayed": {}, "early": {"use_early_comm": True}, "blocking": {"use_early_comm": True, "broadcast_delay": 4},
    "delayed by one": {"broadcast_delay": 1},
    "attention alone": {"use_mlp_comm": False}, "none": {"use_attention_comm": False, "use_mlp_comm": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("head", "sums", "ranks", "workers"),
    [
        ("mean", "delayed", 2, 1), ("sum before the norm", "early", 2, 2), ("one wide head", "delayed by one", 4, 1),
        ("a slice each", "blocking", 2, 3), ("tied", "attention alone", 4, 2),
    ],
)  # fmt: skip
def test_lanes_on_ranks_compute_what_torch_does(head, sums, ranks, workers, tmp_path):
    logits_on_ranks(LANEFORMER | HEADS[head] | SUMS[sums], CAPACITY, tmp_path, ranks, workers)


@pytest.mark.full
@pytest.mark.parametrize(("head", "sums", "ranks"), list(product(HEADS, SUMS, (1, 2, 4, 8))))
def test_every_combination(head, sums, ranks, tmp_path):
    eight = {"num_lanes": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 72}
    logits_on_ranks(LANEFORMER | eight | HEADS[head] | SUMS[sums], CAPACITY, tmp_path, ranks, 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_and_two_ranks_agree(dtype, tmp_path):
    one, two = (logits_on_ranks(LANEFORMER, CAPACITY, tmp_path, ranks, 2, dtype) for ranks in (1, 2))
    assert relative_rmse(two, one) <= LIMITS[dtype]


def test_every_stage_agrees_on_two_ranks(tmp_path):
    module = random_model(LANEFORMER | SUMS["early"], CAPACITY)
    with compile_quickly(module, tmp_path, tp=2, workers=2) as artifact:
        assert len(assert_agrees(artifact, module, CAPACITY, "fp32")) == len(artifact.manifest.stages) - 2


def test_ranks_that_do_not_divide_the_lanes_are_refused(tmp_path):
    with pytest.raises(PartitionError, match="3 ranks do not divide the 4 lanes of .*; 1, 2 or 4 would"):
        compile_quickly(random_model(LANEFORMER, CAPACITY), tmp_path, tp=3)


def test_a_conversation_goes_on_where_it_was(tmp_path):
    """Each rank keeps its own lanes' caches between calls."""
    module = random_model(LANEFORMER, CAPACITY)
    ids = random_ids(LANEFORMER["vocab_size"], 6)
    with compile_quickly(module, tmp_path, tp=2, workers=1) as artifact, artifact.engine() as engine:
        whole = generated(engine, ids, 8)
        with engine.session() as session:
            first = generated(engine, ids[:4], 1, session=session)
            session.rewind(4)
            assert first and generated(engine, ids[4:], 8, session=session) == whole


def test_nobody_reads_what_is_neither_made_nor_sent_into_its_memory(tmp_path):
    """Every rank's exchange buffers begin as NaNs, flags aside: one read too many, and the logits show it."""
    module = random_model(LANEFORMER | SUMS["early"], CAPACITY)
    ids = random_ids(LANEFORMER["vocab_size"], CAPACITY)
    with compile_quickly(module, tmp_path, tp=2, workers=2) as artifact, artifact.engine() as engine:
        layout = make_layout(artifact.program, 4, artifact.manifest.tile_rows)
        expected = engine.logits(ids)
        for block in engine._exchange:
            block.clear = partial(fill_with_nans, block, layout)
        assert_equal_bits(engine.logits(ids), expected)
        untouched = [np.isnan(block.view(np.float32)).sum() for block in engine._exchange]
        assert min(untouched) > 0, "a rank holds all lanes' buffers and uses its own lanes'"


def fill_with_nans(block, layout) -> None:
    block.view(np.uint8)[:] = 0
    for placed in layout.buffers:
        block.view(np.uint8)[placed.data : placed.flags] = 0xFF
