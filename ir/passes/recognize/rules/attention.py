"""Attention over a KV cache, fused or spelled out: scores, scaling, soft-cap, mask, softmax, and the sum over values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, describe, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, Dim, Layout, gaps, paired
from kogc.ir.passes.recognize.masks import HIDDEN_BELOW, visible_by
from kogc.ir.passes.recognize.values import Act, Cache, Pending, Scores, Static, Value

# ── scores = query · keys ──


@dataclass(frozen=True)
class _Heads:
    """One run of query heads: ``size`` heads ``stride`` apart read key/value heads ``kv_stride`` apart."""

    stride: int
    size: int
    kv_stride: int


def scores(context: Context, node: Node, query: Act, keys: Cache, labels: tuple[str, str, str]) -> Scores:
    """The scores of all heads against the whole cache."""
    _check_read(context, keys)
    qs, ks, out = labels
    query_dims = dict(zip(qs, (_by_axis(query, dim) for dim in query.layout.dims), strict=True))
    key_dims = dict(zip(ks, keys.layout.dims, strict=True))
    summed = [pair for label in qs if label in ks and label not in out for pair in paired(query_dims[label], key_dims[label])]
    if any(a != b for a, b in summed) or gaps([a for a, _ in summed], keys.head_dim) != ():
        raise NotUnderstood(f"queries and cached keys are not multiplied over a head of {keys.head_dim} features each")
    heads = query.space.row // keys.head_dim
    runs: list[_Heads] = []
    dims: list[list[Atom]] = []
    for label in out:
        dims.append([_score_atom(query, keys, a, b, runs) for a, b in paired(query_dims.get(label, ()), key_dims.get(label, ()))])
    check_groups(runs, heads, keys.kv_heads)
    layout = Layout(()).with_dims(dims)
    found = Scores(query.node, query.space, keys.node, heads, keys.kv_heads, keys.head_dim, keys.capacity, layout)
    return found if keys.factor == 1 else found.then("scale", keys.factor)


def _check_read(context: Context, cache: Cache) -> None:
    if cache.layout.offset:
        raise NotUnderstood("attention reads a part of a KV cache")
    if context.builder[cache.node].op != "kv_append":
        raise NotUnderstood("attention reads a KV cache before the step's own keys and values are written")


def _by_axis(value: Act, dim: Dim) -> Dim:
    return tuple(part for atom in dim for part in ([a for _, a in value.space.by_axis(atom)] if atom.stride else [atom]))


def _score_atom(query: Act, keys: Cache, q: Atom, k: Atom, runs: list[_Heads]) -> Atom:
    """The atom over [heads, tokens, capacity] for a result dimension made of ``q`` and ``k``."""
    if not q.stride and k.stride == keys.head_dim:
        return Atom(1, k.size)
    if q.stride >= query.space.row and not k.stride:
        return Atom(keys.capacity * (q.stride // query.space.row), q.size)
    if keys.head_dim <= q.stride < query.space.row and q.stride % keys.head_dim == 0 and k.stride % keys.head_stride == 0:
        head = q.stride // keys.head_dim
        runs.append(_Heads(head, q.size, k.stride // keys.head_stride))
        return Atom(head * query.space.tokens * keys.capacity, q.size)
    if not q.stride and not k.stride:
        return Atom(0, q.size)
    raise NotUnderstood("queries and cached keys do not go together head by head")


def check_groups(runs: list[_Heads], heads: int, kv_heads: int) -> None:
    """Query head h must read key/value head h · kv_heads // heads. Raises NotUnderstood otherwise."""
    if heads % kv_heads or gaps([Atom(run.stride, run.size) for run in runs], heads) != ():
        raise NotUnderstood(f"{heads} query heads do not divide over {kv_heads} key/value heads")
    group = heads // kv_heads
    for run in runs:
        inside = run.stride * run.size <= group and run.kv_stride == 0
        between = run.stride % group == 0 and run.kv_stride == run.stride // group
        if not inside and not between:
            raise NotUnderstood(
                f"query heads read the {kv_heads} key/value heads in another order than head h · {kv_heads} // {heads} "
                "(repeated instead of interleaved?)"
            )


# ── masks ──


def masked(context: Context, scores: Scores, mask: Any, visible: Callable[[np.ndarray], np.ndarray], how: str) -> Scores:
    """``scores`` with a mask, whose value ``visible`` turns into bool, true where visible."""
    if not isinstance(mask, Static):
        raise NotUnderstood(f"the attention mask is {describe(mask)}; it must follow from the positions")
    layout, tokens = scores.layout, context.tokens

    def rows(value: np.ndarray) -> np.ndarray:
        return _mask_rows(visible(value), layout, tokens, scores.capacity)

    return scores.then("mask", context.masks.window(mask.name, rows, (how, layout)))


def _mask_rows(shown: np.ndarray, layout: Layout, tokens: int, capacity: int) -> np.ndarray:
    """A mask that broadcasts to the scores, as bool [tokens, capacity]."""
    shown = np.broadcast_to(shown, np.broadcast_shapes(shown.shape, layout.shape))
    if shown.shape != layout.shape:
        raise NotUnderstood(f"a mask {list(shown.shape)} for scores {list(layout.shape)}")
    token_axis = _axis_of(layout, (Atom(capacity, tokens),))
    slot_axis = _axis_of(layout, (Atom(1, capacity),))
    shown = np.moveaxis(shown, (token_axis, slot_axis), (0, 1)).reshape(tokens, capacity, -1)
    if (shown != shown[..., :1]).any():
        raise NotUnderstood("the attention mask differs between heads")
    return shown[..., 0]


def _axis_of(layout: Layout, dim: Dim) -> int:
    if dim not in layout.dims:
        raise NotUnderstood("the attention scores are masked in an unusual arrangement")
    return layout.dims.index(dim)


def biased(context: Context, node: Node, a: Value, b: Any, factor: float) -> Value:
    """Scores plus an additive mask."""
    if isinstance(b, Scores) and factor == 1:
        a, b = b, a
    if isinstance(a, Scores) and factor == 1 and isinstance(b, Static):
        return masked(context, a, b, visible_by, "add")
    raise NotUnderstood(f"attention scores and {describe(b)} are added or subtracted")


@rule("masked_fill")
def masked_fill(context: Context, node: Node, x: Value, mask: Value, number: Any) -> Value:
    return _filled(context, x, mask, number, hidden_where=True)


@rule("where")
def where_(context: Context, node: Node, condition: Value, x: Any, other: Any) -> Value:
    if isinstance(x, Scores):
        return _filled(context, x, condition, other, hidden_where=False)
    return _filled(context, other, condition, x, hidden_where=True)


def _filled(context: Context, x: Any, mask: Any, number: Any, hidden_where: bool) -> Scores:
    fill = context.number(number)
    if not isinstance(x, Scores):
        raise NotUnderstood(f"{describe(x)} is filled by a mask; only attention scores can be")
    if fill is None or fill > HIDDEN_BELOW:
        raise NotUnderstood("hidden attention scores must be filled with one very negative number")
    return masked(context, x, mask, lambda value: ~value if hidden_where else value, f"fill {hidden_where}")


# ── softmax and values ──


@rule("softmax", "_softmax")
def softmax(context: Context, node: Node, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    if not isinstance(x, Scores):
        raise NotUnderstood("softmax of something that is not attention scores over a KV cache (a router of experts?)")
    if x.normalized or x.layout.dims[dim] != (Atom(1, x.capacity),):
        raise NotUnderstood("softmax of attention scores must run once, over the cache's positions")
    return replace(x, normalized=True)


@rule("topk")
def chosen(context: Context, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    raise NotUnderstood(f"the largest of {describe(x)} are chosen, as by the router of a mixture of experts, which is not supported yet")


def mixed(context: Context, node: Node, weights: Scores, values: Cache, labels: tuple[str, str, str]) -> Act:
    """Probabilities times cached values: the attention op."""
    if not weights.normalized:
        raise NotUnderstood("attention scores meet the values without a softmax")
    if values.factor != 1:
        raise NotUnderstood("cached values are multiplied by a number")
    _check_read(context, values)
    ps, vs, out = labels
    p_dims = dict(zip(ps, weights.layout.dims, strict=True))
    v_dims = dict(zip(vs, values.layout.dims, strict=True))
    summed = [pair for label in ps if label in vs and label not in out for pair in paired(p_dims[label], v_dims[label])]
    if summed != [(Atom(1, weights.capacity), Atom(values.head_dim, values.capacity))]:
        raise NotUnderstood("attention probabilities and cached values do not go together slot by slot")
    runs: list[_Heads] = []
    dims = [[_mixed_atom(weights, values, p, v, runs) for p, v in paired(p_dims.get(l, ()), v_dims.get(l, ()))] for l in out]
    check_groups(runs, weights.heads, values.kv_heads)
    sizes = {"heads": weights.heads, "kv_heads": weights.kv_heads, "head_dim": weights.head_dim}
    attrs = sizes | _read_steps(weights)
    if (values.kv_heads, values.head_dim) != (weights.kv_heads, weights.head_dim):
        raise NotUnderstood("keys and values have different numbers or sizes of heads")
    inputs = (weights.query, weights.keys, values.node, context.leaf("position"))
    return context.act("attention", inputs, attrs, weights.space, Layout(()).with_dims(dims), node)


def _mixed_atom(weights: Scores, values: Cache, p: Atom, v: Atom, runs: list[_Heads]) -> Atom:
    per_head = weights.space.tokens * weights.capacity
    if not p.stride and v.stride < values.head_dim:
        return Atom(v.stride, v.size)
    if p.stride >= per_head and v.stride % values.head_stride == 0:
        runs.append(_Heads(p.stride // per_head, p.size, v.stride // values.head_stride))
        return Atom(p.stride // per_head * weights.head_dim, p.size)
    if weights.capacity <= p.stride < per_head and not v.stride:
        return Atom(p.stride // weights.capacity * weights.space.row, p.size)
    raise NotUnderstood("attention probabilities and cached values do not go together head by head")


def _read_steps(weights: Scores) -> dict[str, Any]:
    """Attributes scale, window and softcap from what was done to the scores, in its order."""
    before, after, capped, windows = 1.0, 1.0, False, []
    for step in weights.steps:
        if step.kind == "tanh":
            if capped or windows:
                raise NotUnderstood("a soft-cap of attention scores must come once, before the mask")
            capped = True
        elif step.kind == "mask":
            windows.append(step.number)
        elif step.number <= 0:
            raise NotUnderstood("attention scores are scaled by a number that is not positive")
        elif capped:
            after *= step.number
        else:
            before *= step.number
    if not windows:
        raise NotUnderstood("attention without a mask would read cache slots that are not written yet; mask by position")
    window = min((int(w) for w in windows if w is not None), default=None)
    return {"scale": before * after, "window": window, "softcap": after if capped else None}


# ── the fused op ──


@rule("scaled_dot_product_attention")
def fused(
    context: Context, node: Node, query: Value, keys: Value, values: Value, attn_mask: Value | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Act:
    if dropout_p:
        raise NotUnderstood("attention with dropout")
    if is_causal:
        raise NotUnderstood("is_causal aligns queries with the first slots of the cache; pass a mask made from the positions")
    if not isinstance(query, Act | Pending) or not isinstance(keys, Cache) or not isinstance(values, Cache):
        operands = f"{describe(query)} over {describe(keys)} and {describe(values)}"
        raise NotUnderstood(f"attention of {operands}; keys and values must come from KV caches")
    query = context.whole(query)
    if enable_gqa:
        keys, values = (_grouped(query, cache) for cache in (keys, values))
    q, k, out = (_labels(value.layout, last) for value, last in ((query, "td"), (keys, "sd"), (query, "ts")))
    if len(keys.layout.dims) > len(query.layout.dims):
        out = _labels(keys.layout, "ts")
    number = query.layout.shape[-1] ** -0.5 if scale is None else context.number(scale)
    found = scores(context, node, query, keys, (q, k, out)).then("scale", number)
    if attn_mask is not None:
        found = masked(context, found, attn_mask, visible_by, "add")
    return mixed(context, node, replace(found, normalized=True), values, (out, _labels(values.layout, "sd"), out[:-1] + "d"))


def _labels(layout: Layout, last: str) -> str:
    """Labels of dimensions that line up from the right, ending in ``last``."""
    return "hgfe"[: len(layout.dims) - 2][::-1] + last


def _grouped(query: Act, cache: Cache) -> Cache:
    times = query.layout.shape[-3] // cache.layout.shape[-3]
    return replace(cache, layout=cache.layout.repeated(-3, times, inner=True)) if times > 1 else cache
