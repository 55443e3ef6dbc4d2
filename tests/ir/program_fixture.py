"""Hand-built Programs of a Llama-like and a Laneformer-like model, for tests that need a Program but no frontend.

The embed stage names the table row it starts from ``row``; a ``rope`` part names its one linear ``dot0``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kogc.ir.program import (
    Affine,
    Attention,
    Buffer,
    Cache,
    Const,
    Matrix,
    Operand,
    OpSpec,
    Output,
    Part,
    Program,
    Segment,
    Stage,
)
from kogc.ir.weights import MappedWeights


@dataclass(frozen=True)
class Shape:
    """Sizes of a toy model; heads and ffn count all lanes. ``delay`` and ``early`` only matter with lanes > 1.

    ``early``: ``none`` or ``present``, how layers before ``delay`` sum. ``head``: ``replicate`` (mean of the normed
    lanes, one head) or ``vocab_parallel`` (one vocabulary slice per lane).
    """

    layers: int = 3
    lanes: int = 1
    dim: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    ffn: int = 40
    vocab: int = 53
    capacity: int = 32
    delay: int = 1
    early: str = "none"
    head: str = "replicate"
    window: int = 0
    rope: str = "half"
    splits: int = 2
    dtype: str = "fp32"
    bias: bool = False
    slots: int = 64


Iterations = Sequence[int]


def build(shape: Shape) -> Program:
    """The Program of ``shape``: lanes == 1 is a Llama, lanes > 1 a Laneformer."""
    segments = [Segment("embed", 1, (_embed(shape),)), *_layers(shape), Segment("head", 1, _head(shape))]
    return Program(
        model="toy", dtype=shape.dtype, vocab=shape.vocab, capacity=shape.capacity, step_tokens=(1, 4),
        buffers=_buffers(shape), caches=_caches(shape), segments=tuple(segments), meta={"shape": shape},
    )  # fmt: skip


def llama(**sizes) -> Program:
    return build(Shape(**sizes))


def laneformer(**sizes) -> Program:
    return build(Shape(**{"lanes": 2, "layers": 4, "delay": 2, **sizes}))


def with_stages(program: Program, change: Callable[[Stage], Stage]) -> Program:
    """``program`` with ``change(stage)`` in place of every stage."""
    segments = (replace(segment, stages=tuple(map(change, segment.stages))) for segment in program.segments)
    return replace(program, segments=tuple(segments))


def reads_vector_again(stage: Stage) -> Stage:
    """The stage, if it has dots, with an epilogue that begins by adding rows of their vector, too."""
    if stage.kind != "matvec":
        return stage
    again = OpSpec("again", "add", ("dot0", stage.vector), {}, stage.lanes, stage.vector_width)
    return replace(stage, parts=tuple(replace(part, epilogue=(again, *part.epilogue)) for part in stage.parts))


def random_weights(program: Program, seed: int = 0) -> MappedWeights:
    """Weights of every Matrix, embedding table and weight Const, fp32 normal values rounded to the storage dtype's range."""
    generator = np.random.default_rng(seed)
    shapes = weight_shapes(program)
    return MappedWeights({key: generator.standard_normal(size).astype(np.float32) for key, size in shapes.items()})


def weight_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for _, _, _, stage in program.instances():
        if stage.embed_table:
            shapes[stage.embed_table] = (program.vocab, stage.embed_width)
        for matrix in (m for part in stage.parts for m in part.matrices):
            lanes = (matrix.lanes,) if matrix.lanes > 1 else ()
            shapes.update({key: (*lanes, matrix.rows_from + matrix.rows, matrix.k) for key in matrix.keys})
        for const in (c for c in stage.consts if c.kind == "weight"):
            lanes = (const.lanes,) if const.lanes > 1 else ()
            shapes.update({key: (*lanes, *const.shape) for key in const.keys})
    return shapes


def rope_tables(program: Program, theta: float = 10000.0) -> dict[str, np.ndarray]:
    """cos and sin [capacity, head_dim/2] under the keys the fixtures use."""
    shape: Shape = program.meta["shape"]
    inverse = theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = np.arange(shape.capacity)[:, None] * inverse[None]
    return {"rope.cos": np.cos(angle), "rope.sin": np.sin(angle)}


def random_shapes(most_lanes: int = 8):
    """Hypothesis strategy: awkward shapes (prime widths, odd numbers of heads, partly filled tiles) of both kinds."""
    from hypothesis import strategies as st

    def shape(lanes, kv, group, half_dim, dim, ffn, vocab, layers, delay, rest) -> Shape:
        early, head, rope, splits, window, bias = rest
        delay = min(delay, layers - 1)
        return Shape(
            layers=layers, lanes=lanes, dim=dim, kv_heads=kv * lanes, heads=kv * group * lanes, head_dim=2 * half_dim,
            ffn=ffn * lanes, vocab=vocab * lanes, delay=delay, early=early, head=head, rope=rope, splits=splits,
            window=window, bias=bias,
        )  # fmt: skip

    rest = st.tuples(
        st.sampled_from(["none", "present"]), st.sampled_from(["replicate", "vocab_parallel"]),
        st.sampled_from(["half", "interleaved"]), st.integers(1, 4), st.sampled_from([0, 5]), st.booleans(),
    )  # fmt: skip
    primes = st.sampled_from([5, 7, 13, 23, 31])
    return st.builds(
        shape, st.integers(1, most_lanes), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), primes, primes,
        st.sampled_from([3, 11, 29]), st.integers(2, 4), st.integers(1, 3), rest,
    )  # fmt: skip


# ── segments ──


def _layers(s: Shape) -> list[Segment]:
    """Loops of equal layers. A layer that takes over a blocking sum of the layer before is a segment of its own."""
    blocking = s.lanes > 1 and s.early == "present"
    early = 0 if s.lanes == 1 else min(s.delay, s.layers)
    mode = lambda i: "plain" if s.lanes == 1 else (s.early if i < early else "past")
    spans = [(0, early), (early, s.layers)]
    if blocking:
        spans = [(i, i + 1) for i in range(min(early + 1, s.layers))] + [(early + 1, s.layers)]
    segments = []
    for first, last in (span for span in spans if span[0] < span[1]):
        pending = blocking and 0 < first <= early
        name = f"layers_{first}_{last - 1}" if last - first > 1 else f"layer_{first}"
        segments.append(Segment(name, last - first, _layer(s, range(first, last), mode(first), pending)))
    return segments


def _layer(s: Shape, layers: range, mode: str, pending: bool) -> tuple[Stage, ...]:
    """The five stages of equal layers. ``pending``: the previous layer's blocking MLP sum is still to be added."""
    x = _XWrites(s, layers)
    return (
        _qkv(s, layers, x, pending),
        _attention(s, layers),
        _row_stage(s, layers, x, "o", mode, x.layer_input, x.after_attention, _attention_input(s, layers)),
        _gate_up(s, layers, x, pending=mode == "present"),
        _row_stage(s, layers, x, "m", mode, x.after_attention, x.layer_output, _ffn_input(s, layers)),
    )


class _XWrites:
    """Write numbers of the residual: embed is 0, layer i makes 1 + 2i (after attention) and 2 + 2i (after the MLP)."""

    def __init__(self, s: Shape, layers: range) -> None:
        first = layers[0]
        self.layer_input = Affine(2 * first, 2)
        self.before_pending = Affine(2 * first - 1, 2)
        self.after_attention = Affine(1 + 2 * first, 2)
        self.layer_output = Affine(2 + 2 * first, 2)


def _embed(s: Shape) -> Stage:
    epilogue = (OpSpec("x0", "lane_broadcast", ("row",), {"lanes": s.lanes}, s.lanes, s.dim),) if s.lanes > 1 else ()
    out = Output("x0" if epilogue else "row", "buffer", "x", Affine(0))
    part = Part("embed", "row", (), epilogue, (out,))
    return Stage("embed", "embedding", "embed", 1, parts=(part,), embed_table="embed.weight", embed_width=s.dim)


def _norm(s: Shape, layers: Iterations, name: str, x: str, scope: str = "own") -> tuple[Const, OpSpec]:
    const = Const(f"{name}_scale", "weight", tuple(f"layers.{i}.{name}.weight" for i in layers), 1, (s.dim,))
    return const, OpSpec(name, "rms_norm", (x, const.name), {"eps": 1e-5}, s.lanes, s.dim, scope)


def _pending_sum(s: Shape, layers: range, value: str, x: str, before: Affine, after: Affine):
    """Operands, prologue and output of x += sum of every lane's ``value``, made by the stage that needs it first."""
    first = layers[0] - (1 if value == "m" else 0)
    operands = (
        Operand("x", "x", before, "lane", s.lanes, s.dim),
        Operand(value, value, Affine(first, 1), "all_lanes", s.lanes, s.dim),
    )
    prologue = (
        OpSpec(f"{value}_sum", "lane_sum", (value,), {}, 1, s.dim, "all"),
        OpSpec("x_new", "add", ("x", f"{value}_sum"), {}, s.lanes, s.dim),
    )
    return operands, prologue, (Output("x_new", "buffer", "x", after),)


def _qkv(s: Shape, layers: range, x: _XWrites, pending: bool) -> Stage:
    operands, adds, published = (Operand("x", "x", x.layer_input, "lane", s.lanes, s.dim),), (), ()
    if pending:
        operands, adds, published = _pending_sum(s, layers, "m", "x", x.before_pending, x.layer_input)
    scale, norm = _norm(s, layers, "attention_norm", "x_new" if pending else "x")
    tables = tuple(Const(n, "table", (f"rope.{n}",), 1, (s.capacity, s.head_dim // 2)) for n in ("cos", "sin"))
    biases = tuple(_bias(s, layers, n, rows) for n, rows in _qkv_rows(s).items()) if s.bias else ()
    return Stage(
        f"qkv_{layers[0]}", "q, k and v projections", "matvec", s.lanes, operands, (scale, *tables, *biases), (*adds, norm),
        published, norm.name, s.dim, tuple(_qkv_part(s, layers, n, rows) for n, rows in _qkv_rows(s).items()),
    )  # fmt: skip


def _qkv_rows(s: Shape) -> dict[str, int]:
    kv = s.kv_heads * s.head_dim // s.lanes
    return {"q": s.heads * s.head_dim // s.lanes, "k": kv, "v": kv}


def _bias(s: Shape, layers: Iterations, name: str, rows: int) -> Const:
    return Const(f"{name}_bias", "weight", tuple(f"layers.{i}.{name}.bias" for i in layers), s.lanes, (rows,))


def _qkv_part(s: Shape, layers: range, name: str, rows: int) -> Part:
    value, epilogue = "dot0", ()
    if s.bias:
        epilogue += (OpSpec(f"{name}_biased", "add", (value, f"{name}_bias"), {}, s.lanes, rows),)
        value = f"{name}_biased"
    rope = None
    if name != "v":
        rope = {"style": s.rope, "head_dim": s.head_dim, "rotary_dim": s.head_dim}
        epilogue += (OpSpec(f"{name}_turned", "rope", (value, "cos", "sin", "position"), rope, s.lanes, rows),)
        value = f"{name}_turned"
    if name == "q":
        out = Output(value, "buffer", "q", Affine(layers[0], 1))
    else:
        out = Output(value, "cache", f"{name}_order", Affine(layers[0], 1), tuple(f"layers.{i}.{name}" for i in layers))
    matrix = _matrix(s, layers, name, rows, s.dim)
    return Part(name, "rope" if rope else "row", (matrix,), epilogue, (out,), rope)


def _matrix(s: Shape, layers: Iterations, name: str, rows: int, k: int) -> Matrix:
    return Matrix(tuple(f"layers.{i}.{name}.weight" for i in layers), s.lanes, rows, k)


def _attention(s: Shape, layers: range) -> Stage:
    at, kv = Affine(layers[0], 1), s.kv_heads * s.head_dim // s.lanes
    operands = (
        Operand("q", "q", at, "heads", s.lanes, s.heads * s.head_dim // s.lanes),
        Operand("k", "k_order", at, "cache", s.lanes, kv),
        Operand("v", "v_order", at, "cache", s.lanes, kv),
    )
    windows = tuple(s.window if i < s.delay else 0 for i in layers)
    core = Attention(
        "q", s.heads // s.lanes, s.kv_heads // s.lanes, s.head_dim, s.head_dim**-0.5, 0.0, s.splits,
        tuple((f"layers.{i}.k", f"layers.{i}.v") for i in layers), windows, Output("partials", "buffer", "partials", at),
    )  # fmt: skip
    return Stage(f"attention_{layers[0]}", "attention", "attention", s.lanes, operands, attention=core)


def _attention_input(s: Shape, layers: range) -> tuple[Operand, tuple[OpSpec, ...], str, int]:
    width = s.heads // s.lanes * s.head_dim
    operand = Operand("partials", "partials", Affine(layers[0], 1), "lane", s.lanes, _partials_width(s))
    attrs = {"heads": s.heads // s.lanes, "splits": s.splits, "head_dim": s.head_dim}
    return operand, (OpSpec("attended", "attention_combine", ("partials",), attrs, s.lanes, width),), "attended", width


def _ffn_input(s: Shape, layers: range) -> tuple[Operand, tuple[OpSpec, ...], str, int]:
    return Operand("h", "h", Affine(layers[0], 1), "lane", s.lanes, s.ffn // s.lanes), (), "h", s.ffn // s.lanes


def _row_stage(s: Shape, layers: range, x: _XWrites, name: str, mode: str, before: Affine, after: Affine, source) -> Stage:
    """``o`` or down projection (``m``) with the residual update of ``mode`` in its epilogue."""
    vector_operand, prologue, vector, k = source
    operands: tuple[Operand, ...] = (vector_operand,)
    epilogue: tuple[OpSpec, ...] = ()
    outputs: tuple[Output, ...] = ()
    value = "dot0"
    if mode != "plain":
        outputs += (Output("dot0", "buffer", name, Affine(layers[0], 1)),)
    if mode == "none":
        epilogue += (OpSpec("grown", "scale", (value,), {"factor": s.lanes**0.5}, s.lanes, s.dim),)
        value = "grown"
    if mode == "past":
        operands += (Operand("past", name, Affine(layers[0] - s.delay, 1), "rows_all_lanes", s.lanes, s.dim),)
        epilogue += (
            OpSpec("others", "lane_others", ("past",), {}, s.lanes, s.dim),
            OpSpec("with_others", "add", (value, "others"), {}, s.lanes, s.dim),
        )
        value = "with_others"
    if mode != "present":
        operands += (Operand("x", "x", before, "rows", s.lanes, s.dim),)
        epilogue += (OpSpec("x_new", "add", ("x", value), {}, s.lanes, s.dim),)
        outputs += (Output("x_new", "buffer", "x", after),)
    part = Part(name, "row", (_matrix(s, layers, name, s.dim, k),), epilogue, outputs)
    return Stage(f"{name}_{layers[0]}", f"{name} projection", "matvec", s.lanes, operands, (), prologue, (), vector, k, (part,))


def _gate_up(s: Shape, layers: range, x: _XWrites, pending: bool) -> Stage:
    operands, adds, published = (Operand("x", "x", x.after_attention, "lane", s.lanes, s.dim),), (), ()
    if pending:
        operands, adds, published = _pending_sum(s, layers, "o", "x", x.layer_input, x.after_attention)
    scale, norm = _norm(s, layers, "ffn_norm", "x_new" if pending else "x")
    width = s.ffn // s.lanes
    gated = OpSpec("h", "gated_activation", ("dot0", "dot1"), {"fn": "silu"}, s.lanes, width)
    matrices = tuple(_matrix(s, layers, n, width, s.dim) for n in ("gate", "up"))
    part = Part("gate_up", "gated", matrices, (gated,), (Output("h", "buffer", "h", Affine(layers[0], 1)),))
    return Stage(
        f"gate_up_{layers[0]}", "gate and up projections", "matvec", s.lanes, operands, (scale,), (*adds, norm), published,
        norm.name, s.dim, (part,),
    )  # fmt: skip


def _head(s: Shape) -> tuple[Stage, ...]:
    """Final norm, head and sampling. Needs ``delay`` < ``layers`` when early layers sum without delay."""
    own = s.lanes == 1 or s.head == "vocab_parallel"
    x = Operand("x", "x", Affine(2 * s.layers), "lane" if own else "all_lanes", s.lanes, s.dim)
    scale, norm = _norm(s, ("final",), "norm", "x", "own" if own else "all")
    prologue = (norm,) if own else (norm, OpSpec("mean", "lane_mean", (norm.name,), {}, 1, s.dim, "all"))
    lanes = s.lanes if own else 1
    matrix = Matrix(("head.weight",), lanes, s.vocab // lanes, s.dim)
    part = Part("head", "row", (matrix,), (), (Output("dot0", "logits", "best", Affine(0)),))
    best = Operand("best", "best", Affine(0), "best", 1, 1)
    return (
        Stage("head", "vocabulary head", "matvec", lanes, (x,), (scale,), prologue, (), prologue[-1].name, s.dim, (part,)),
        Stage("sample", "next token", "sample", 1, (best,)),
    )


# ── tables ──


def _partials_width(s: Shape) -> int:
    return s.heads // s.lanes * s.splits * (s.head_dim + 2)


def _buffers(s: Shape) -> tuple[Buffer, ...]:
    kv, n = s.kv_heads * s.head_dim // s.lanes, s.layers
    scope = "group" if s.lanes > 1 else "grid"

    def make(name: str, payload: str, width: int, writes: int, where: str = scope) -> Buffer:
        return Buffer(name, payload, s.lanes, width, writes, s.slots, where)

    crossing = (make("o", "vector", s.dim, n, "grid"), make("m", "vector", s.dim, n, "grid")) if s.lanes > 1 else ()
    return (
        make("x", "vector", s.dim, 1 + 2 * n, "grid"),
        make("q", "vector", s.heads * s.head_dim // s.lanes, n),
        make("k_order", "cache", kv, n),
        make("v_order", "cache", kv, n),
        make("partials", "partials", _partials_width(s), n),
        make("h", "vector", s.ffn // s.lanes, n),
        *crossing,
        Buffer("best", "best", 1, 1, 1, s.slots),
    )


def _caches(s: Shape) -> tuple[Cache, ...]:
    return tuple(Cache(f"layers.{i}.{n}", s.kv_heads, s.head_dim, s.capacity) for i in range(s.layers) for n in ("k", "v"))
