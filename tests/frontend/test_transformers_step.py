"""Folders of architectures that kogc has no module for go through Transformers, where it is installed."""

import json

import numpy as np
import pytest
import torch

from kogc.frontend.errors import FrontendError
from kogc.frontend.load import load_model
from kogc.frontend.trace import trace
from kogc.ir.interpret import run_sequence
from kogc.ir.verify import verify

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Qwen3", {"tie_word_embeddings": True}), ("Qwen2", {}), ("Mistral", {"sliding_window": 3})],
)
def test_traced_step_computes_what_the_model_computes(kind, more, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, max_context=16)
    graph = verify(trace(loaded.module))
    tokens = [3, 1, 4, 1, 5, 9, 2]
    with torch.no_grad():
        want = model.double()(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(run_sequence(graph, tokens, loaded.weights), want, rtol=0, atol=1e-5)
    assert loaded.context == graph.meta["capacity"] == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, expected at most 4096"),
        ({"hidden_size": "32"}, "Validation error for field 'hidden_size': .*expected int, got str"),
        ({"hidden_act": "nosuch"}, "cannot build the model: there is no 'nosuch'"),
        ({"model_type": None}, "`model_type` is None, expected laneformer, .* or a type that Transformers knows"),
        ({"max_position_embeddings": 1}, "a context of 1 leaves no position to look back to"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_configurations_that_cannot_be_used(changes, message, tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SHAPE, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FrontendError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FrontendError, match="`model_type` is 'qwen3'; laneformer.* are built in, for others, and for a model's own code, install transformers"):
        load_model(tmp_path)
