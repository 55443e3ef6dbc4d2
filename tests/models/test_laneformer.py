"""Laneformer against the released-format goldens and against an independent lane-by-lane implementation."""

import pytest
import torch
from data import data_dir, golden
from lane_reference import reference_logits

from kogc.models.batch import batch_logits
from kogc.models.build import build_model, required_tensors

GOLDENS = ("lane4_delay2_window", "lane2_delay1_lanehead_lanenorms", "lane8_delay2_vocabparallel")

BASE = {
    "model_type": "laneformer_tp",
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 14,
    "max_position_embeddings": 16,
    "norm_eps": 1e-5,
    "rope_theta": 50.0,
    "num_lanes": 2,
    "broadcast_delay": 1,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "use_early_comm": True,
    "lm_head_type": "replicate",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "swa_layers": [],
}

VARIANTS = {
    "early": {},
    "late": {"use_early_comm": False},
    "delay-0": {"broadcast_delay": 0},
    "delay-2": {"broadcast_delay": 2},
    "delay-2-late": {"broadcast_delay": 2, "use_early_comm": False},
    "delay-beyond-depth": {"broadcast_delay": 9},
    "delay-beyond-depth-late": {"broadcast_delay": 9, "use_early_comm": False},
    "no-comm": {"use_attention_comm": False, "use_mlp_comm": False},
    "no-attention-comm": {"use_attention_comm": False},
    "no-mlp-comm": {"use_mlp_comm": False, "use_early_comm": False},
    "one-lane": {"num_lanes": 1, "broadcast_delay": 2},
    "four-lanes": {"num_lanes": 4, "num_key_value_heads": 4},
    "lane-norms": {"replicated_rmsn_scale": False},
    "lane-head": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "sliced-head": {"lm_head_type": "vocab_parallel"},
    "sum-before-norm": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
    "tied": {"tie_word_embeddings": True},
    "window": {"sliding_window": 3, "swa_layers": [0, 2]},
    "window-1": {"sliding_window": 1, "swa_layers": [1]},
    "rope-scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def random_model(config, capacity=16):
    """A model with random values everywhere, norm scales included."""
    model = build_model(config, capacity)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def steps(model, ids, chunk):
    """Logits of `ids` fed in chunks of `chunk` positions."""
    token, position = torch.tensor(ids), torch.arange(len(ids))
    with torch.no_grad():
        return torch.cat([model(t, p) for t, p in zip(token.split(chunk), position.split(chunk), strict=True)])


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("chunk", [1, 7, 24])
def test_released_format_goldens(name, chunk):
    checkpoint = torch.load(data_dir() / f"laneformer_{name}.pt", weights_only=True)
    expected = golden("laneformer_golden.json")[name]
    assert required_tensors(checkpoint["config"]) == {k: tuple(v.shape) for k, v in checkpoint["state_dict"].items()}
    model = build_model(checkpoint["config"], 64).double()
    model.load_state_dict(checkpoint["state_dict"])

    logits = steps(model, expected["ids"], chunk)

    for row, key in ((0, "logits_first"), (-1, "logits_last")):
        # Printed with six decimals, so half a unit of the last one is what rounding explains.
        torch.testing.assert_close(logits[row], torch.tensor(expected[key]).double(), rtol=0, atol=6e-7)
    assert logits.argmax(-1).tolist() == expected["argmax"]


@pytest.mark.parametrize("name", GOLDENS)
def test_greedy_continuation(name):
    checkpoint = torch.load(data_dir() / f"laneformer_{name}.pt", weights_only=True)
    expected = golden("laneformer_golden.json")[name]
    model = build_model(checkpoint["config"], 64).double()
    model.load_state_dict(checkpoint["state_dict"])

    found, feed, start = [], expected["prompt"], 0
    for _ in expected["greedy"]:
        with torch.no_grad():
            logits = model(torch.tensor(feed), torch.arange(start, start + len(feed)))
        start += len(feed)
        feed = [int(logits[-1].argmax())]
        found += feed

    assert found == expected["greedy"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option_against_lane_by_lane_reference(variant):
    config = BASE | VARIANTS[variant]
    model = random_model(config).double()
    ids = torch.randint(config["vocab_size"], (9,)).tolist()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    expected = torch.from_numpy(reference_logits(config, weights, ids))

    for chunk in (1, 4, 9):
        torch.testing.assert_close(steps(model, ids, chunk), expected, rtol=1e-10, atol=1e-10)


def test_options_change_the_logits():
    """The reference test above is only worth something if the options matter on these inputs."""
    same_weights = ["early", "late", "delay-0", "delay-2", "no-comm", "no-attention-comm", "window", "rope-scaling"]
    state = random_model(BASE).double().state_dict()
    results = []
    for variant in same_weights:
        model = build_model(BASE | VARIANTS[variant], 16).double()
        model.load_state_dict(state)
        results.append(steps(model, list(range(9)), 9))
    for i, a in enumerate(results):
        for b in results[:i]:
            assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["early", "late", "delay-2", "no-mlp-comm", "tied", "window", "four-lanes"])
def test_batch_path_has_the_same_logits(variant):
    config = BASE | VARIANTS[variant]
    model = random_model(config).double()
    tokens = torch.randint(config["vocab_size"], (3, 11))

    logits = batch_logits(model, tokens)

    for row, found in zip(tokens, logits, strict=True):
        torch.testing.assert_close(found, steps(model, row.tolist(), 11), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["lane-head", "sliced-head", "sum-before-norm", "lane-norms"])
def test_batch_path_refuses_what_it_does_not_train(variant):
    model = build_model(BASE | VARIANTS[variant], 16)
    with pytest.raises(ValueError, match="replicate"):
        batch_logits(model, torch.zeros(1, 4, dtype=torch.int64))
