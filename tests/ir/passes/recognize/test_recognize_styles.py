"""Hand-written modules in the styles that decoder code is written in: all become the same decode ops."""

import math

import pytest
import torch
import torch.nn.functional as F
from decoder_styles import (
    CAPACITY,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    SIZE,
    VOCAB,
    Conv1dFused,
    Decoder,
    Gemma3,
    GptFast,
    GroupedEinsum,
    HeadByHead,
    HuggingFace,
    MatmulWeights,
    NormsOfEveryHead,
    Olmo2,
    QKNorm,
    QueryChunks,
    RMSNorm,
    SlicedPairs,
    SwiGLU,
    angles,
    decoder,
)
from torch import nn

# ── attention styles ──


def attentions(graph):
    return [dict(node.attrs) for node in graph if node.op == "attention"]


def test_gpt_fast(recognized, ops):
    graph = recognized(decoder(GptFast))
    assert ops(graph) == {
        "embed": 1, "rms_norm": 5, "linear": 15, "rope": 4, "kv_append": 4, "attention": 2, "gated_activation": 2, "add": 4,
    }  # fmt: skip
    rows = {n.attrs["rows"] for n in graph if n.op == "linear" and n.inputs[1] == "blocks.0.attention.wqkv.weight"}
    assert rows == {(0, 48), (48, 64), (64, 80)}
    assert {n.attrs["style"] for n in graph if n.op == "rope"} == {"interleaved"}
    assert next(n for n in graph if n.op == "cache").type.shape == (KV, CAPACITY, SIZE)


def test_hugging_face(recognized, ops):
    graph = recognized(decoder(HuggingFace))
    assert {n.attrs["style"] for n in graph if n.op == "rope"} == {"half"}
    assert attentions(graph)[0] == {"heads": HEADS, "kv_heads": KV, "head_dim": SIZE, "scale": SIZE**-0.5, "window": None, "softcap": None}
    assert "scale" not in ops(graph) and len(graph.tables) == 2


def test_grouped_einsum(recognized, ops):
    graph = recognized(decoder(GroupedEinsum))
    assert attentions(graph)[0]["scale"] == pytest.approx(SIZE**-0.5)
    assert "scale" not in ops(graph)  # the query's factor went into attention
    assert {n.attrs["style"] for n in graph if n.op == "rope"} == {"interleaved"}


def test_sliced_pairs(recognized):
    graph = recognized(decoder(SlicedPairs))
    assert attentions(graph)[0] == {"heads": HEADS, "kv_heads": KV, "head_dim": SIZE, "scale": 0.25, "window": 6, "softcap": None}
    assert all(len(n.inputs) == 3 for n in graph if n.op == "linear" and ".attention." in n.name)


def test_matmul_weights(recognized):
    graph = recognized(decoder(MatmulWeights))
    assert attentions(graph)[0]["softcap"] == pytest.approx(30)
    assert {(n.attrs["style"], n.attrs["rotary_dim"], n.attrs["head_dim"]) for n in graph if n.op == "rope"} == {("half", 4, SIZE)}
    assert graph["blocks.0.attention.wq.linear"].type.shape == ("T", HEADS * SIZE)
    assert dict(graph["blocks.0.attention.wq"].attrs) == {"key": "blocks.0.attention.wq", "transpose": True}


def test_query_chunks(recognized, ops):
    graph = recognized(decoder(QueryChunks))
    assert attentions(graph)[0]["kv_heads"] == 1
    assert "rope" not in ops(graph)


def test_conv1d_fused(recognized):
    graph = recognized(decoder(Conv1dFused))
    query = next(n for n in graph if n.op == "linear" and n.attrs.get("rows") == (0, HEADS * SIZE))
    assert graph[query.inputs[1]].attrs["transpose"] and graph[query.inputs[2]].attrs["rows"] == (0, HEADS * SIZE)


def test_norms_over_all_heads(recognized, ops):
    graph = recognized(decoder(Olmo2))
    assert ops(graph)["rms_norm"] == 9
    assert {graph[n.inputs[0]].op for n in graph if n.op == "rope"} == {"rms_norm"}


def test_norms_per_head(recognized, ops):
    graph = recognized(decoder(QKNorm))
    assert ops(graph)["rms_norm"] == 9
    assert {graph[n.inputs[0]].attrs["group"] for n in graph if n.op == "rope"} == {SIZE}
    assert {graph[graph[n.inputs[0]].inputs[1]].type.shape for n in graph if n.op == "rope"} == {(SIZE,)}


def test_a_norm_of_its_own_for_every_head_is_one_over_groups(recognized, ops):
    graph = recognized(decoder(NormsOfEveryHead))
    assert ops(graph)["layer_norm"] == 4 and ops(graph)["linear"] == 15
    norms = [node for node in graph if node.op == "layer_norm"]
    assert {node.attrs["group"] for node in norms} == {SIZE}
    joined = [graph[node.inputs[1]] for node in norms]
    assert sorted(leaf.type.shape for leaf in joined) == sorted([(HEADS * SIZE,), (KV * SIZE,)] * 2)
    assert all(len(leaf.attrs["joined"]) * SIZE == leaf.type.shape[0] for leaf in joined)
    assert all(len(graph[node.inputs[0]].inputs) == 3 for node in norms)  # the bias is in the linear


def test_queries_keys_and_values_side_by_side_in_every_head(recognized):
    graph = recognized(decoder(HeadByHead))
    linears = [n for n in graph if n.op == "linear" and ".attention.qkv" in n.inputs[1]]
    assert len(linears) == 6 and all(len(n.inputs) == 3 and n.type.shape == ("T", HEADS * SIZE) for n in linears)
    weights = {graph[n.inputs[1]].attrs["groups"] for n in linears}
    assert weights == {(-2, part * SIZE, SIZE, 3 * SIZE, HEADS) for part in range(3)}
    assert {graph[n.inputs[2]].attrs["groups"][0] for n in linears} == {-1}


def test_two_thetas_make_two_pairs_of_tables(recognized):
    graph = recognized(decoder(Gemma3, layers=4))
    assert sorted(graph.tables) == ["rope.cos", "rope.cos_1", "rope.sin", "rope.sin_1"]


# ── norms, MLPs, heads ──


class FusedNorm(nn.RMSNorm):
    def __init__(self):
        super().__init__(HIDDEN, eps=1e-6)
        nn.init.uniform_(self.weight, 0.5, 1.5)


class NormByDivision(RMSNorm):
    def forward(self, x):
        return x * self.weight / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + self.eps)


class GemmaNorm(RMSNorm):
    def forward(self, x):
        wide = x.double()
        return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5) * (1.0 + self.weight.double())).type_as(x)


class LayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(HIDDEN)
        nn.init.uniform_(self.weight, 0.5, 1.5)
        nn.init.normal_(self.bias)


class ExplicitLayerNorm(LayerNorm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) + self.bias


class VarianceLayerNorm(LayerNorm):
    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


@pytest.mark.parametrize(
    "norm, op, attrs",
    [
        (FusedNorm, "rms_norm", {"eps": 1e-6}),
        (NormByDivision, "rms_norm", {"eps": 1e-5}),
        (GemmaNorm, "rms_norm", {"eps": 1e-5, "scale_offset": 1.0}),
        (LayerNorm, "layer_norm", {"eps": 1e-5}),
        (ExplicitLayerNorm, "layer_norm", {"eps": 1e-5}),
        (VarianceLayerNorm, "layer_norm", {"eps": 1e-5}),
    ],
)
def test_norms(recognized, norm, op, attrs):
    graph = recognized(decoder(HuggingFace, norm=norm, layers=1))
    norms = [n for n in graph if n.op in ("rms_norm", "layer_norm")]
    assert {n.op for n in norms} == {op} and len(norms) == 3
    assert all(dict(n.attrs) == attrs for n in norms)
    assert all(len(n.inputs) == (3 if op == "layer_norm" else 2) for n in norms)


class FusedGate(SwiGLU):
    """gate and up in one weight."""

    def __init__(self):
        nn.Module.__init__(self)
        self.both, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class SpelledSilu(SwiGLU):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class NewGelu(nn.Module):
    """GPT-2's formula and a plain two-layer MLP with biases, by addmm."""

    def __init__(self):
        super().__init__()
        self.fc, self.fc_bias = nn.Parameter(torch.randn(HIDDEN, INNER) * 0.2), nn.Parameter(torch.randn(INNER))
        self.proj, self.proj_bias = nn.Parameter(torch.randn(INNER, HIDDEN) * 0.2), nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        h = torch.addmm(self.fc_bias, x, self.fc)
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return torch.addmm(self.proj_bias, h, self.proj)


class GeluTanhGate(SwiGLU):
    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class DefinedSilu(SwiGLU):
    """silu by its definition."""

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate / (1 + torch.exp(-gate)) * self.up(x))


class ErfGelu(SwiGLU):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))))


class QuickGelu(SwiGLU):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(1.702 * gate))


@pytest.mark.parametrize(
    "mlp, op, fn",
    [
        (FusedGate, "gated_activation", "silu"),
        (SpelledSilu, "gated_activation", "silu"),
        (DefinedSilu, "gated_activation", "silu"),
        (QuickGelu, "gated_activation", "sigmoid"),
        (GeluTanhGate, "gated_activation", "gelu_tanh"),
        (NewGelu, "activation", "gelu_tanh"),
        (ErfGelu, "activation", "gelu"),
    ],
)
def test_mlps(recognized, mlp, op, fn):
    graph = recognized(decoder(HuggingFace, mlp=mlp, layers=1))
    assert [(n.op, n.attrs["fn"]) for n in graph if n.op in ("activation", "gated_activation")] == [(op, fn)]


class Gpt2(Decoder):
    """Learned positions, LayerNorm, tied head, no rope."""

    norm, mlp, attention = LayerNorm, NewGelu, QueryChunks

    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(CAPACITY, HIDDEN).double()
        del self.head

    def forward(self, token, position):
        x = self.embed(token) + self.wpe(position)
        for block in self.blocks:
            x = x + block["attention"](block["n1"](x), position)
            x = x + block["mlp"](block["n2"](x))
        return F.linear(self.final(x), self.embed.weight)


def test_gpt2_like(recognized):
    graph = recognized(Gpt2())
    assert [graph[n.inputs[0]].op for n in graph if n.op == "embed"] == ["token", "position"]
    assert graph[graph.outputs[0]].inputs[1] == "embed.weight"


class Gemma2(Decoder):
    """Embedding scale, post-norms, parallel blocks' sum, final soft-cap, multipliers, sinusoidal positions."""

    norm, attention = GemmaNorm, SlicedPairs

    def __init__(self):
        super().__init__()
        self.register_buffer("normalizer", torch.tensor(HIDDEN**0.5, dtype=torch.float64))
        self.register_buffer("sinusoids", torch.cat([angles(HIDDEN).sin(), angles(HIDDEN).cos()], -1))
        self.post = nn.ModuleList(GemmaNorm().double() for _ in self.blocks)

    def forward(self, token, position):
        x = self.embed(token) * self.normalizer + self.sinusoids[position]
        for block, post in zip(self.blocks, self.post, strict=True):
            h = block["n1"](x)
            x = x + 0.5 * (post(block["attention"](h, position)) + block["mlp"](h))
        return torch.tanh(self.head(self.final(x)) / 5.0) * 5.0


def test_gemma2_like(recognized, ops):
    graph = recognized(Gemma2())
    counts = ops(graph)
    assert counts["softcap"] == 1 and counts["scale"] == 3 and counts["embed"] == 2
    assert graph[graph.outputs[0]].attrs["cap"] == 5.0


class LanesByBmm(nn.Module):
    """Lanes first: [L, T, D] with bmm, lanes summed by sum(0), others by subtraction; gate and up per lane in one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        lanes = self.lanes = 2
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.both = nn.Parameter(torch.randn(lanes, HIDDEN, 2 * INNER) * 0.2)
        self.down = nn.Parameter(torch.randn(lanes, INNER, HIDDEN) * 0.2)
        self.scale, self.bias = nn.Parameter(torch.rand(lanes, 1, HIDDEN)), nn.Parameter(torch.randn(lanes, 1, 2 * INNER))
        self.attention, self.head = HuggingFace(), nn.Linear(HIDDEN, VOCAB)
        self.double()

    def mlp(self, x):
        gate, up = (torch.bmm(x, self.both) + self.bias).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down)

    def forward(self, token, position):
        x = self.embed[token]
        x = x + self.attention(x, position)
        x = x[None].repeat(self.lanes, 1, 1)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        first = self.mlp(normed)
        x = x + first
        second = self.mlp(x)
        x = x + (first.sum(0) - first) + second
        x = x + second.sum(0) - second
        return self.head(x.sum(0) / self.lanes)


def test_lanes_by_bmm(recognized, ops):
    counts = ops(recognized(LanesByBmm()))
    assert counts["lane_others"] == 2 and counts["lane_mean"] == 1 and counts["lane_broadcast"] == 1
    assert counts["gated_activation"] == 2
