"""Views of weights become weights of their own, and the graph computes what it computed."""

import numpy as np
import pytest
import torch
from decoder_styles import VOCAB, Conv1dFused, HeadByHead, MatmulWeights, NormsOfEveryHead, decoder

from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.passes.recognize import recognize
from kogc.ir.passes.views import ViewedWeights, separate_views, source_key
from kogc.ir.verify import verify
from kogc.ir.weights import MappedWeights
from kogc.models.build import build_model

ONE_LANE = {
    "model_type": "laneformer", "num_lanes": 1, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 20, "vocab_size": VOCAB, "max_position_embeddings": 20, "lm_head_type": "replicate", "replicated_rmsn_scale": False,
}  # fmt: skip


def one_lane() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(ONE_LANE, 20).double()


@pytest.mark.parametrize(
    "make", [lambda: decoder(MatmulWeights), lambda: decoder(Conv1dFused), lambda: decoder(HeadByHead), lambda: decoder(NormsOfEveryHead), one_lane],
    ids=["transposed", "parts", "groups", "joined", "one lane"],
)
def test_logits_stay(make):
    module = make().eval()
    stored = MappedWeights({name: tensor.detach().numpy() for name, tensor in module.named_parameters()})
    before = verify(recognize(trace(module)))
    viewed = separate_views(before)
    after = verify(viewed.graph)
    weights = ViewedWeights(stored, viewed.leaves)
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    expected = run_sequence(before, ids, stored)
    np.testing.assert_allclose(run_sequence(after, ids, weights), expected, rtol=0, atol=1e-9 * np.abs(expected).max())

    leaves = [node for node in after if node.op == "weight"]
    assert len({leaf.attrs["key"] for leaf in leaves}) == len({(l.attrs["key"], l.type) for l in leaves})
    for leaf in leaves:
        assert set(leaf.attrs) <= {"key", "source"}
        assert weights.get(leaf.attrs["key"]).shape == leaf.type.shape
        assert source_key(leaf) in stored.keys()


def test_plain_leaves_keep_their_keys():
    graph = recognize(trace(decoder(MatmulWeights)))
    viewed = separate_views(graph)
    plain = {node.attrs["key"] for node in graph if node.op == "weight" and not node.attrs.get("transpose")}
    assert plain < set(viewed.leaves) and "blocks.0.attention.wq.T" in viewed.leaves
