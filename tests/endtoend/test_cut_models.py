"""Models without lanes cut over cpu ranks: the logits of PyTorch, also where ranks outnumber key/value heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from against_torch import LIMITS, assert_agrees, compile_quickly, logits_on_ranks, random_model, relative_rmse

from kogc.ir.passes.partition import PartitionError

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

CAPACITY = 17
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 37, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 48, "vocab_size": 56, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
STYLES = {
    "plain": {}, "tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1}, "a head each": {"num_key_value_heads": 8}, "odd words": {"vocab_size": 53},
}  # fmt: skip


@pytest.mark.parametrize(
    ("style", "ranks", "workers", "dtype"),
    [("biases", 2, 2, "fp32"), ("plain", 8, 1, "fp16"), ("one key head", 4, 1, "bf16"), ("odd words", 2, 3, "fp32")],
)
def test_cut_models_compute_what_torch_does(style, ranks, workers, dtype, tmp_path):
    logits_on_ranks(LLAMA | STYLES[style], CAPACITY, tmp_path, ranks, workers, dtype)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_on_every_number_of_ranks(style, ranks, tmp_path):
    logits_on_ranks(LLAMA | STYLES[style], CAPACITY, tmp_path, ranks, 1)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_one_and_two_ranks_agree(dtype, tmp_path):
    one, two = (logits_on_ranks(LLAMA, CAPACITY, tmp_path, ranks, 1, dtype) for ranks in (1, 2))
    assert relative_rmse(two, one) <= LIMITS[dtype]


def test_every_stage_agrees_where_ranks_share_a_key_head(tmp_path):
    module = random_model(LLAMA | STYLES["biases"], CAPACITY)
    with compile_quickly(module, tmp_path, tp=4, workers=1) as artifact:
        assert len(assert_agrees(artifact, module, CAPACITY, "fp32")) == len(artifact.manifest.stages) - 2
        files = [artifact.weights(rank) for rank in range(4)]
        assert all(len(files[rank]) == len(artifact.section("stream", rank)) < len(files[0]) for rank in (1, 2, 3))
        assert all(np.shares_memory(artifact.section(name, rank), files[0]) for name in ("embed", "consts", "plan") for rank in range(4))


def test_heads_that_do_not_divide_are_refused(tmp_path):
    with pytest.raises(PartitionError, match="3 ranks do not divide the 8 heads of .*; 1, 2, 4 or 8 would"):
        compile_quickly(random_model(LLAMA | {"num_key_value_heads": 1}, CAPACITY), tmp_path, tp=3)
