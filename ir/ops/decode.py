"""Decode ops: what a decoder step is made of once layout, casts and masks are gone.

Values have the canonical shape ``[T, features]`` or, with a lane axis, ``[T, lanes, features]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kogc.ir.ops import OpRow, register
from kogc.ir.ops.activations import ACTIVATIONS
from kogc.ir.types import T, TensorType

Types = tuple[TensorType, ...]
Arrays = tuple[np.ndarray, ...]
Attrs = Mapping[str, Any]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _value(kind: TensorType, what: str) -> None:
    _need(len(kind.shape) in (2, 3) and kind.shape[0] == T, f"{what} must be [T, features] or [T, lanes, features], is {kind}")


def _same(types: Types, attrs: Attrs) -> TensorType:
    _value(types[0], "operand")
    return types[0]


def _equal(types: Types, attrs: Attrs) -> TensorType:
    for kind in types:
        _value(kind, "operand")
        _need(kind.shape == types[0].shape, f"operands differ: {types[0]} and {kind}")
    return types[0]


# ── embedding and linear ──


def _embed_shape(types: Types, attrs: Attrs) -> TensorType:
    token, table = types
    _need(token.shape == (T,), f"token must be [T], is {token}")
    _need(len(table.shape) == 2, f"embedding table must be [vocab, features], is {table}")
    return TensorType((T, table.shape[1]), table.dtype)


def _linear_shape(types: Types, attrs: Attrs) -> TensorType:
    x, weight, *bias = types
    _value(x, "x")
    first, last = _rows(weight, attrs)
    _need(0 <= first < last <= weight.shape[-2], f"rows {first}:{last} lie outside weight {weight}")
    _need(x.shape[-1] == weight.shape[-1], f"x has {x.shape[-1]} features, weight {weight} takes {weight.shape[-1]}")
    if len(weight.shape) == 3:
        _need(len(x.shape) == 3 and x.shape[1] == weight.shape[0], f"weight {weight} has lanes, x is {x}")
        shape: tuple = (T, weight.shape[0], last - first)
    else:
        _need(len(x.shape) == 2, f"weight {weight} has no lanes, x is {x}")
        shape = (T, last - first)
    if bias:
        _need(bias[0].shape == shape[1:], f"bias must be {list(shape[1:])}, is {bias[0]}")
    return TensorType(shape, x.dtype)


def _rows(weight: TensorType, attrs: Attrs) -> tuple[int, int]:
    return attrs.get("rows") or (0, weight.shape[-2])


def _linear(operands: Arrays, attrs: Attrs) -> np.ndarray:
    x, weight, *bias = operands
    if attrs.get("rows"):
        weight = weight[..., attrs["rows"][0] : attrs["rows"][1], :]
    spec = "tlk,lnk->tln" if weight.ndim == 3 else "tk,nk->tn"
    y = np.einsum(spec, x, weight, optimize=True)
    return y + bias[0] if bias else y


def _linear_flops(types: Types, attrs: Attrs) -> int:
    first, last = _rows(types[1], attrs)
    lanes = types[1].shape[0] if len(types[1].shape) == 3 else 1
    return 2 * lanes * (last - first) * types[1].shape[-1]


# ── norms ──


def _norm_shape(types: Types, attrs: Attrs) -> TensorType:
    x = types[0]
    _value(x, "x")
    group = attrs.get("group") or x.shape[-1]
    _need(x.shape[-1] % group == 0, f"{x} does not divide into groups of {group} features")
    for vector in types[1:]:
        fits = vector.shape in ((group,), x.shape[-1:], x.shape[1:])
        _need(fits, f"norm scale must be [features], [group] or [lanes, features] of {x}, is {vector}")
    return x


def _in_groups(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    """The groups of features that are normed together as an axis of their own: [..., groups, group]."""
    return x.reshape(*x.shape[:-1], -1, attrs.get("group") or x.shape[-1])


def _for_groups(vector: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A scale or bias of x; one of a single group goes with all of them."""
    return np.tile(vector, x.shape[-1] // vector.shape[-1])


def _rms_norm(operands: Arrays, attrs: Attrs) -> np.ndarray:
    x, *scale = operands
    groups = _in_groups(x, attrs)
    y = (groups / np.sqrt(np.mean(groups * groups, axis=-1, keepdims=True) + attrs["eps"])).reshape(x.shape)
    return y * (_for_groups(scale[0], x) + attrs.get("scale_offset", 0.0)) if scale else y


def _layer_norm(operands: Arrays, attrs: Attrs) -> np.ndarray:
    x, *rest = operands
    groups = _in_groups(x, attrs)
    centred = groups - np.mean(groups, axis=-1, keepdims=True)
    y = (centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + attrs["eps"])).reshape(x.shape)
    if rest:
        y = y * _for_groups(rest[0], x)
    return y + _for_groups(rest[1], x) if len(rest) > 1 else y


# ── attention ──


def rope_pairs(style: str, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Index pairs [head_dim/2, 2] of one head. The first rotary_dim/2 pairs rotate, the rest pass through.

    ``interleaved`` pairs (0,1),(2,3)…; ``half`` pairs (j, j + rotary_dim/2).
    """
    turning = np.arange(rotary_dim).reshape(-1, 2) if style == "interleaved" else np.arange(rotary_dim).reshape(2, -1).T
    return np.concatenate([turning, np.arange(rotary_dim, head_dim).reshape(-1, 2)])


def _rope_shape(types: Types, attrs: Attrs) -> TensorType:
    x, cos, sin, position = types
    _value(x, "x")
    _need(attrs["style"] in ("interleaved", "half"), f"rope style {attrs['style']!r} is not interleaved or half")
    _need(x.shape[-1] % attrs["head_dim"] == 0, f"{x} does not divide into heads of {attrs['head_dim']}")
    _need(cos.shape == sin.shape and cos.shape[1:] == (attrs["rotary_dim"] // 2,), f"rope tables must be [capacity, {attrs['rotary_dim'] // 2}], are {cos}, {sin}")
    _need(position.shape == (T,), f"position must be [T], is {position}")
    return x


def _rope(operands: Arrays, attrs: Attrs) -> np.ndarray:
    x, cos, sin, position = operands
    heads = x.reshape(x.shape[0], -1, attrs["head_dim"])
    pairs = rope_pairs(attrs["style"], attrs["head_dim"], attrs["rotary_dim"])[: attrs["rotary_dim"] // 2]
    first, second = heads[..., pairs[:, 0]], heads[..., pairs[:, 1]]
    c, s = cos[position][:, None, :], sin[position][:, None, :]
    turned = heads.copy()
    turned[..., pairs[:, 0]] = first * c - second * s
    turned[..., pairs[:, 1]] = second * c + first * s
    return turned.reshape(x.shape)


def _append_shape(types: Types, attrs: Attrs) -> TensorType:
    cache, x, position = types
    kv_heads, _, head_dim = cache.shape
    _value(x, "x")
    _need(x.elements_per_token == kv_heads * head_dim, f"{x} does not fill one position of the cache {cache}")
    return cache


def _append(operands: Arrays, attrs: Attrs) -> np.ndarray:
    cache, x, position = operands
    kv_heads, _, head_dim = cache.shape
    after = cache.copy()
    after[:, position] = x.reshape(x.shape[0], kv_heads, head_dim).transpose(1, 0, 2)
    return after


def _attention_shape(types: Types, attrs: Attrs) -> TensorType:
    q, keys, values, position = types
    _value(q, "q")
    heads, kv_heads, head_dim = attrs["heads"], attrs["kv_heads"], attrs["head_dim"]
    _need(q.elements_per_token == heads * head_dim, f"q {q} is not {heads} heads of {head_dim}")
    _need(heads % kv_heads == 0, f"{heads} query heads do not divide over {kv_heads} key/value heads")
    for cache in (keys, values):
        _need((cache.shape[0], cache.shape[2]) == (kv_heads, head_dim), f"cache {cache} is not {kv_heads} heads of {head_dim}")
    return q


def _scores(operands: Arrays, attrs: Attrs) -> np.ndarray:
    """Masked scores [heads, T, capacity]; -inf where invisible."""
    q, keys, _, position = operands
    heads, kv_heads, head_dim = attrs["heads"], attrs["kv_heads"], attrs["head_dim"]
    grouped = q.reshape(q.shape[0], kv_heads, heads // kv_heads, head_dim)
    scores = np.einsum("tgrd,gsd->grts", grouped, keys, optimize=True) * attrs["scale"]
    if attrs.get("softcap"):
        scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
    age = position[:, None] - np.arange(keys.shape[1])[None, :]
    visible = (age >= 0) & (age < (attrs.get("window") or keys.shape[1] + 1))
    return np.where(visible, scores, -np.inf).reshape(heads, q.shape[0], -1)


def _attention(operands: Arrays, attrs: Attrs) -> np.ndarray:
    q, _, values, _ = operands
    scores = _scores(operands, attrs)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    grouped = weights.reshape(values.shape[0], -1, *weights.shape[1:])
    return np.einsum("grts,gsd->tgrd", grouped, values, optimize=True).reshape(q.shape)


# ── pointwise ──


def _activation_shape(types: Types, attrs: Attrs) -> TensorType:
    _need(attrs["fn"] in ACTIVATIONS, f"unknown activation {attrs['fn']!r}; known: {', '.join(ACTIVATIONS)}")
    return _equal(types, attrs)


# ── lanes ──


def _laned(kind: TensorType) -> None:
    _need(len(kind.shape) == 3 and kind.shape[0] == T, f"operand must be [T, lanes, features], is {kind}")


def _keep_lanes(types: Types, attrs: Attrs) -> TensorType:
    _laned(types[0])
    return types[0]


def _drop_lanes(types: Types, attrs: Attrs) -> TensorType:
    _laned(types[0])
    return TensorType((T, types[0].shape[2]), types[0].dtype)


def _concat_lanes(types: Types, attrs: Attrs) -> TensorType:
    _laned(types[0])
    return TensorType((T, types[0].shape[1] * types[0].shape[2]), types[0].dtype)


def _broadcast_shape(types: Types, attrs: Attrs) -> TensorType:
    _need(len(types[0].shape) == 2 and types[0].shape[0] == T, f"operand must be [T, features], is {types[0]}")
    return TensorType((T, attrs["lanes"], types[0].shape[1]), types[0].dtype)


def _sample_shape(types: Types, attrs: Attrs) -> TensorType:
    _need(len(types[0].shape) == 2, f"logits must be [T, vocab], are {types[0]}")
    return TensorType((T,), "int64")


def _row(name, operands, attrs, shape, evaluate, role, doc, **more) -> None:
    register(OpRow(name, tuple(operands.split()), attrs, shape, evaluate, role, doc, **more))


_row("embed", "token table", {}, _embed_shape, lambda o, a: o[1][o[0]], "core", "Row ``token`` of the embedding table.")
_row("linear", "x weight bias", {"rows": "(int, int) | None"}, _linear_shape, _linear, "core",
     "x · weightᵀ (+ bias). ``rows`` takes a slice of the weight's rows. A weight with a lane axis is one block per lane.",
     flops=_linear_flops, optional=1)
_row("rms_norm", "x scale", {"eps": "float", "scale_offset": "float | None", "group": "int | None"}, _norm_shape, _rms_norm, "whole",
     "x / sqrt(mean(x²) + eps) · (scale + scale_offset), over the features, or over every ``group`` of neighbouring features (a head).",
     optional=1)
_row("layer_norm", "x scale bias", {"eps": "float", "group": "int | None"}, _norm_shape, _layer_norm, "whole",
     "(x − mean) / sqrt(var + eps) · scale + bias, over the features, or over every ``group`` of neighbouring features.", optional=2)
_row("rope", "x cos sin position", {"style": "str", "head_dim": "int", "rotary_dim": "int"}, _rope_shape, _rope, "rowwise",
     "Rotate index pairs of every head by the position's angles; dims past rotary_dim pass through.")
_row("kv_append", "cache x position", {}, _append_shape, _append, "state",
     "The cache with x [T, kv_heads·head_dim] written at the tokens' positions.")
_row("attention", "q keys values position",
     {"heads": "int", "kv_heads": "int", "head_dim": "int", "scale": "float", "window": "int | None", "softcap": "float | None"},
     _attention_shape, _attention, "core",
     "Causal attention over the cache; ``window`` w shows key k to query q iff 0 ≤ q − k < w. Head h reads group h·kv_heads//heads. Heads and kv_heads count all lanes.")
_row("activation", "x", {"fn": "str"}, _activation_shape, lambda o, a: ACTIVATIONS[a["fn"]](o[0]), "rowwise", "fn(x).")
_row("gated_activation", "gate up", {"fn": "str"}, _activation_shape, lambda o, a: ACTIVATIONS[a["fn"]](o[0]) * o[1], "rowwise", "fn(gate) · up.")
_row("add", "a b", {}, _equal, lambda o, a: o[0] + o[1], "rowwise", "a + b.")
_row("mul", "a b", {}, _equal, lambda o, a: o[0] * o[1], "rowwise", "a · b.")
_row("scale", "x", {"factor": "float"}, _same, lambda o, a: o[0] * a["factor"], "rowwise", "x · factor.")
_row("softcap", "x", {"cap": "float"}, _same, lambda o, a: a["cap"] * np.tanh(o[0] / a["cap"]), "rowwise", "cap · tanh(x / cap).")
_row("lane_broadcast", "x", {"lanes": "int"}, _broadcast_shape, lambda o, a: np.repeat(o[0][:, None], a["lanes"], 1), "rowwise",
     "The same vector on every lane.")
_row("lane_sum", "x", {}, _drop_lanes, lambda o, a: o[0].sum(1), "whole", "Sum over the lanes.")
_row("lane_others", "x", {}, _keep_lanes, lambda o, a: o[0].sum(1, keepdims=True) - o[0], "whole",
     "For every lane the sum over the other lanes (what a delayed exchange delivers).")
_row("lane_mean", "x", {}, _drop_lanes, lambda o, a: o[0].mean(1), "whole", "Mean over the lanes.")
_row("lane_concat", "x", {}, _concat_lanes, lambda o, a: o[0].reshape(o[0].shape[0], -1), "whole", "Lanes side by side: [T, lanes·features].")
_row("sample", "logits", {}, _sample_shape, lambda o, a: o[0].argmax(-1), "core", "The next token: the (first) largest logit.")
