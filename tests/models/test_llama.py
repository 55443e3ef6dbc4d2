"""Llama against real small checkpoints with expected tokens, and its options against plain formulas."""

import pytest
import torch
import torch.nn.functional as F
from data import data_dir, golden
from lane_reference import stretched_frequency
from llama2c import read_llama2c, to_rotate_half

from kogc.models.build import build_model, required_tensors
from kogc.models.config import RopeScaling
from kogc.models.layers import rope_frequencies
from kogc.models.presets import PRESETS


@pytest.mark.parametrize("name", ["stories260K", "babyllama_tok105"])
def test_greedy_tokens_of_real_checkpoints(name):
    config, state = read_llama2c(data_dir() / f"{name}.bin")
    assert required_tensors(config) == {k: tuple(v.shape) for k, v in state.items()}
    model = build_model(config, config["max_position_embeddings"])
    model.load_state_dict(state)

    for case in golden("golden.json")[name]:
        feed, start, found = case["ids"], 0, []
        for _ in case["out"]:
            with torch.no_grad():
                logits = model(torch.tensor(feed), torch.arange(start, start + len(feed)))
            start += len(feed)
            feed = [int(logits[-1].argmax())]
            found += feed
        assert found == case["out"], case["prompt"]


def test_rotate_half_order_moves_pairs_apart():
    rows = torch.arange(8.0)[:, None]
    assert to_rotate_half(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def plain_llama(model, ids):
    """Logits [T, V] of one sequence, written with whole-sequence tensors and no cache."""
    config, w = model.config, model.state_dict()
    heads, kv, hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name + ".weight"]

    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    angle = torch.arange(len(ids)).double()[:, None] * config.rope_theta ** -(torch.arange(0, hd, 2).double() / hd)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rope(x):
        turned = torch.complex(x[..., : hd // 2].contiguous(), x[..., hd // 2 :].contiguous()) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm")
        q = rope(linear(h, at + "self_attn.q_proj").view(-1, heads, hd))
        k = rope(linear(h, at + "self_attn.k_proj").view(-1, kv, hd)).repeat_interleave(heads // kv, 1)
        v = linear(h, at + "self_attn.v_proj").view(-1, kv, hd).repeat_interleave(heads // kv, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * hd**-0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + linear(mixed, at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm")
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 10},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
    ],
    ids=str,
)
def test_options_against_plain_formulas(changes):
    model = build_model(PRESETS["llama-tiny"] | changes, 16).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        ids = torch.randint(256, (11,))
        expected = plain_llama(model, ids.tolist())
        for chunk in (1, 4, 11):
            parts = [model(t, p) for t, p in zip(ids.split(chunk), torch.arange(11).split(chunk), strict=True)]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-10, atol=1e-10)


def test_llama3_scaling_follows_the_published_rule():
    values = PRESETS["llama-3.1-8b"]["rope_scaling"]
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    plain = rope_frequencies(128, 500000.0, None)
    expected = torch.tensor([stretched_frequency(f, values) for f in plain.tolist()], dtype=torch.float64)
    assert torch.allclose(rope_frequencies(128, 500000.0, scaling), expected, rtol=1e-12)
    assert expected[0] == plain[0] and expected[-1] == plain[-1] / 8
