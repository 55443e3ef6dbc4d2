"""Decode graphs of Llama-like and Laneformer-like models, as the recogniser makes them, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kogc.ir.graph import Graph, Node
from kogc.ir.ops import op_row
from kogc.ir.types import TensorType
from kogc.ir.weights import MappedWeights


@dataclass(frozen=True)
class Model:
    """Sizes and options. Heads and ``ffn`` count all lanes; ``lanes`` 0 builds a Llama, ≥ 1 a Laneformer with a lane axis.

    ``windows``: layer → window. ``parallel``: attention and MLP read one norm. ``post_norm``: a Llama that norms block outputs
    before it adds them. ``qk_norm``: queries and keys are normed by ``head`` or as a ``whole``. ``positions``: learned ones are
    added to the embedding and nothing turns. ``head``: replicate, lane, vocab_parallel or pre_norm_lane_agg.
    """

    layers: int = 3
    lanes: int = 0
    dim: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    ffn: int = 20
    vocab: int = 24
    capacity: int = 24
    delay: int = 1
    early: bool = False
    attention_comm: bool = True
    mlp_comm: bool = True
    lane_norms: bool = False
    head: str = "replicate"
    windows: dict[int, int] = field(default_factory=dict)
    style: str = "half"
    rotary_dim: int | None = None
    bias: bool = False
    tied: bool = False
    parallel: bool = False
    post_norm: bool = False
    fused_qkv: bool = False
    gated: bool = True
    softcap: float = 0.0
    embed_scale: float = 0.0
    qk_norm: str = ""
    positions: bool = False


@dataclass
class Built:
    graph: Graph
    weights: MappedWeights


def build(model: Model, seed: int = 0) -> Built:
    return _Builder(model, seed).build()


def llama(seed: int = 0, **options) -> Built:
    return build(Model(**options), seed)


def laneformer(seed: int = 0, **options) -> Built:
    return build(Model(**{"lanes": 2, "layers": 4, "style": "interleaved", **options}), seed)


class _Builder:
    def __init__(self, model: Model, seed: int) -> None:
        self.m = model
        self.random = np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}
        self.graph = Graph("decode", "laneformer" if model.lanes else "llama")
        self.attention_outputs: list[str] = []
        self.mlp_outputs: list[str] = []
        self.appends: list[str] = []

    def build(self) -> Built:
        x = self.start()
        for layer in range(self.m.layers):
            x = self._layer(layer, x)
        return self.finish(x)

    def start(self) -> str:
        """Step inputs, tables and the embedded token, on every lane."""
        m = self.m
        self.leaf("token", TensorType(("T",), "int64"))
        self.leaf("position", TensorType(("T",), "int64"))
        self._tables()
        x = self.op("embed", "token", self._embedding())
        if m.embed_scale:
            x = self.op("scale", x, factor=m.embed_scale)
        if m.positions:
            x = self.op("add", x, self.op("embed", "position", self.weight("model.wpe.weight", m.capacity, m.dim)))
        return self.op("lane_broadcast", x, lanes=m.lanes) if m.lanes else x

    def finish(self, x: str) -> Built:
        """Head and results."""
        logits = self._head(x, "model.norm", self._embedding())
        if self.m.softcap:
            logits = self.op("softcap", logits, cap=self.m.softcap)
        self.graph.outputs, self.graph.effects = (logits,), tuple(self.appends)
        return Built(self.graph, MappedWeights(self.weights))

    def _embedding(self) -> str:
        name = "tok_embeddings" if self.m.lanes else "embed_tokens"
        return self.weight(f"model.{name}.weight", self.m.vocab, self.m.dim)

    # ── nodes ──

    def leaf(self, op: str, kind: TensorType, name: str | None = None, **attrs) -> str:
        name = name or op
        if name not in self.graph:
            self.graph.add(Node(name, op, (), kind, attrs))
        return name

    def weight(self, key: str, *shape: int) -> str:
        if key not in self.weights:
            self.weights[key] = self.random.standard_normal(shape) / np.sqrt(shape[-1])
        return self.leaf("weight", TensorType(shape, "fp32"), key.replace(".", "_"), key=key)

    def op(self, op: str, *inputs: str, **attrs) -> str:
        kind = op_row(op).shape(tuple(self.graph[name].type for name in inputs), attrs)
        name = f"{op}_{len(self.graph)}"
        self.graph.add(Node(name, op, inputs, kind, attrs, source=f"model.py:{len(self.graph)}: {op}"))
        return name

    def linear(self, x: str, key: str, rows: int, k: int, lanes: int | None = None, bias: bool = False) -> str:
        lead = (lanes,) if lanes else ()
        weights = [self.weight(f"{key}.weight", *lead, rows, k)]
        if bias:
            weights.append(self.weight(f"{key}.bias", *lead, rows))
        return self.op("linear", x, *weights)

    def norm(self, x: str, key: str, laned: bool) -> str:
        m = self.m
        per_lane = laned and m.lane_norms
        scale = self.weight(f"{key}.scale", m.lanes, m.dim) if per_lane else self.weight(f"{key}.weight", m.dim)
        return self.op("rms_norm", x, scale, eps=1e-5)

    def _tables(self) -> None:
        half = (self.m.rotary_dim or self.m.head_dim) // 2
        angle = np.arange(self.m.capacity)[:, None] * 0.5 ** np.arange(half)[None]
        for key, values in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
            self.graph.tables[key] = values.astype(np.float32)
            self.leaf("table", TensorType(values.shape, "fp32"), key, key=key)

    # ── blocks ──

    def _layer(self, layer: int, x: str) -> str:
        m = self.m
        if m.lanes:
            base, norms = f"model.layers.{layer}", ("attention_norm", "ffn_norm")
        else:
            base, norms = f"model.layers.{layer}", ("input_layernorm", "post_attention_layernorm")
        normed = self.norm(x, f"{base}.{norms[0]}", laned=True)
        attended = self._attention(layer, base, normed)
        if m.parallel:
            return self.op("add", self.op("add", x, attended), self._mlp(base, normed))
        x = self._land(x, attended, self.attention_outputs, m.attention_comm)
        output = self._mlp(base, self.norm(x, f"{base}.{norms[1]}", laned=True))
        return self._land(x, output, self.mlp_outputs, m.mlp_comm)

    def _attention(self, layer: int, base: str, x: str) -> str:
        m, lanes = self.m, self.m.lanes or 1
        q_rows, kv_rows = m.heads * m.head_dim // lanes, m.kv_heads * m.head_dim // lanes
        names = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
        if not m.lanes:
            names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        if m.fused_qkv:
            weight = self.weight(f"{base}.self_attn.qkv_proj.weight", *self._lead(), q_rows + 2 * kv_rows, m.dim)
            cuts = ((0, q_rows), (q_rows, q_rows + kv_rows), (q_rows + kv_rows, q_rows + 2 * kv_rows))
            q, k, v = (self.op("linear", x, weight, rows=cut) for cut in cuts)
        else:
            sizes = (q_rows, kv_rows, kv_rows)
            q, k, v = (self.linear(x, f"{base}.{n}", r, m.dim, m.lanes, m.bias) for n, r in zip(names, sizes))
        if m.qk_norm:
            q, k = self._normed_heads(q, f"{base}.self_attn.q_norm"), self._normed_heads(k, f"{base}.self_attn.k_norm")
        if not m.positions:
            turn = {"style": m.style, "head_dim": m.head_dim, "rotary_dim": m.rotary_dim or m.head_dim}
            q, k = (self.op("rope", one, "cos", "sin", "position", **turn) for one in (q, k))
        caches = [self.op("kv_append", self._cache(layer, n), value, "position") for n, value in (("k", k), ("v", v))]
        self.appends += caches
        attended = self.op(
            "attention", q, *caches, "position", heads=m.heads, kv_heads=m.kv_heads, head_dim=m.head_dim,
            scale=m.head_dim**-0.5, window=m.windows.get(layer), softcap=None,
        )  # fmt: skip
        return self.linear(attended, f"{base}.{names[3]}", m.dim, q_rows, m.lanes, m.bias)

    def _normed_heads(self, x: str, key: str) -> str:
        if self.m.qk_norm == "head":
            return self.op("rms_norm", x, self.weight(f"{key}.weight", self.m.head_dim), eps=1e-5, group=self.m.head_dim)
        return self.op("rms_norm", x, self.weight(f"{key}.weight", *self.graph[x].type.shape[1:]), eps=1e-5)

    def _cache(self, layer: int, name: str) -> str:
        m = self.m
        kind = TensorType((m.kv_heads, m.capacity, m.head_dim), "fp32")
        return self.leaf("cache", kind, f"cache_{name}_{layer}", key=f"layers.{layer}.{name}")

    def _mlp(self, base: str, x: str) -> str:
        m = self.m
        rows = m.ffn // (m.lanes or 1)
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2") if m.lanes else ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        gate = self.linear(x, f"{base}.{names[0]}", rows, m.dim, m.lanes, m.bias)
        if m.gated:
            up = self.linear(x, f"{base}.{names[1]}", rows, m.dim, m.lanes, m.bias)
            hidden = self.op("gated_activation", gate, up, fn="silu")
        else:
            hidden = self.op("activation", gate, fn="gelu")
        return self.linear(hidden, f"{base}.{names[2]}", m.dim, rows, m.lanes, m.bias)

    def _land(self, x: str, output: str, outputs: list[str], comm: bool) -> str:
        """x after a block's output, by the normative rule of the Laneformer facts."""
        m, layer = self.m, len(outputs)
        if not m.lanes:
            outputs.append(output)
            key = f"model.layers.{layer}.{'mlp' if outputs is self.mlp_outputs else 'self_attn'}_post_norm"
            return self.op("add", x, self.norm(output, key, laned=False) if m.post_norm else output)
        outputs.append(output)
        if layer < m.delay and m.early:
            return self.op("add", x, self.op("lane_broadcast", self.op("lane_sum", output), lanes=m.lanes))
        if layer < m.delay or not comm:
            return self.op("add", x, self.op("scale", output, factor=m.lanes**0.5))
        others = self.op("lane_others", outputs[layer - m.delay])
        return self.op("add", x, self.op("add", output, others))

    def _head(self, x: str, norm: str, table: str) -> str:
        m = self.m
        if not m.lanes:
            x = self.norm(x, norm, laned=False)
            return self.op("linear", x, table) if m.tied else self.linear(x, "lm_head", m.vocab, m.dim)
        if m.head == "pre_norm_lane_agg":
            x = self.norm(self.op("lane_sum", x), norm, laned=False)
            return self.linear(x, "lm_head", m.vocab, m.dim)
        x = self.norm(x, norm, laned=True)
        if m.head == "lane":
            return self.linear(self.op("lane_concat", x), "lm_head.linear", m.vocab, m.lanes * m.dim)
        if m.head == "vocab_parallel":
            return self.op("lane_concat", self.linear(x, "lm_head", m.vocab // m.lanes, m.dim, m.lanes))
        x = self.op("lane_mean", x)
        return self.op("linear", x, table) if m.tied else self.linear(x, "lm_head", m.vocab, m.dim)

    def _lead(self) -> Sequence[int]:
        return (self.m.lanes,) if self.m.lanes else ()


class Graphs:
    """Small graphs that are no whole model, each for one question."""

    @staticmethod
    def summed_linear() -> Built:
        """A linear over lanes, a blocking sum of it, and a second linear that is added to what it normed."""
        make = _Builder(Model(lanes=2), 0)
        x = make.start()
        y = make.linear(x, "first", make.m.dim, make.m.dim, 2)
        total = make.op("add", x, make.op("lane_broadcast", make.op("lane_sum", y), lanes=2))
        z = make.linear(make.norm(total, "norm", laned=True), "second", make.m.dim, make.m.dim, 2)
        return make.finish(make.op("add", total, z))

    @staticmethod
    def skips(sources: Sequence[int]) -> Built:
        """Layers of one linear each; layer i also adds what the linear of layer ``sources[i]`` ≤ i made."""
        make = _Builder(Model(), 0)
        x, made = make.start(), []
        for layer, source in enumerate(sources):
            base = f"model.layers.{layer}"
            made.append(make.linear(make.norm(x, f"{base}.norm", laned=False), f"{base}.mix", make.m.dim, make.m.dim))
            x = make.op("add", make.op("add", x, made[layer]), made[source])
        return make.finish(x)

    @staticmethod
    def normed_query() -> Built:
        return Graphs._attending(normed="q")

    @staticmethod
    def normed_key() -> Built:
        return Graphs._attending(normed="k")

    @staticmethod
    def _attending(normed: str) -> Built:
        """One attention whose query or key is normed between its linear and its rope."""
        make = _Builder(Model(heads=2, kv_heads=2, head_dim=8), 0)
        x = make.start()
        heads = {}
        for name in "qkv":
            heads[name] = make.linear(x, f"{name}_proj", 16, make.m.dim)
            if name == normed:
                heads[name] = make.norm(heads[name], "norm", laned=False)
            if name != "v":
                heads[name] = make.op("rope", heads[name], "cos", "sin", "position", style="half", head_dim=8, rotary_dim=8)
        caches = [make.op("kv_append", make._cache(0, n), heads[n], "position") for n in "kv"]
        make.appends += caches
        sizes = {"heads": 2, "kv_heads": 2, "head_dim": 8, "scale": 1.0, "window": None, "softcap": None}
        attended = make.op("attention", heads["q"], *caches, "position", **sizes)
        return make.finish(attended)

    @staticmethod
    def normed_position() -> Built:
        make = _Builder(Model(), 0)
        make.start()
        return make.finish(make.norm(make.op("embed", "position", make.weight("places", 24, make.m.dim)), "norm", laned=False))

    @staticmethod
    def turned_twice() -> Built:
        make = _Builder(Model(heads=2, kv_heads=2, head_dim=8, qk_norm="head"), 0)
        x = make.start()
        turn = {"style": "half", "head_dim": 8, "rotary_dim": 8}
        k = make._normed_heads(make.linear(x, "k_proj", 16, make.m.dim), "k_norm")
        for _ in range(2):
            k = make.op("rope", k, "cos", "sin", "position", **turn)
        make.appends.append(make.op("kv_append", make._cache(0, "k"), k, "position"))
        return make.finish(x)

    @staticmethod
    def normed_logits() -> Built:
        make = _Builder(Model(vocab=16), 0)
        built = make.finish(make.start())
        built.graph.outputs = (make.norm(built.graph.outputs[0], "norm", laned=False),)
        return built
