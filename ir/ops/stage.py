"""Stage-level ops: attention split over the context, as workers compute it between two exchanges."""

from __future__ import annotations

import numpy as np

from kogc.ir.ops import OpRow, register
from kogc.ir.ops.decode import Arrays, Attrs, Types, _attention_shape, _need, _scores, _value
from kogc.ir.types import TensorType

#: Behind the head_dim accumulated values of a partial result: the running maximum and the sum of weights.
PARTIAL_EXTRA = 2


def partial_width(heads: int, splits: int, head_dim: int) -> int:
    """Features of the partial results of ``heads`` heads: [heads, splits, head_dim + 2] side by side."""
    return heads * splits * (head_dim + PARTIAL_EXTRA)


def visible_range(position: np.ndarray, window: int | None) -> tuple[int, int]:
    """Cache positions [first, last) that at least one token of the step sees."""
    first = max(0, int(position.min()) - window + 1) if window else 0
    return first, int(position.max()) + 1


def _partial_shape(types: Types, attrs: Attrs) -> TensorType:
    q = _attention_shape(types, attrs)
    _need(attrs["splits"] >= 1, f"splits is {attrs['splits']}, must be at least 1")
    lanes = q.shape[1:-1]
    _need(not lanes or attrs["kv_heads"] % lanes[0] == 0, f"{attrs['kv_heads']} key/value heads do not divide over {q}")
    heads = q.shape[-1] // attrs["head_dim"]
    return TensorType((*q.shape[:-1], partial_width(heads, attrs["splits"], attrs["head_dim"])), "fp32")


def _partial(operands: Arrays, attrs: Attrs) -> np.ndarray:
    q, _, values, position = operands
    scores = _scores(operands, attrs)  # [heads, T, capacity]
    heads, tokens = scores.shape[:2]
    head_dim, splits = attrs["head_dim"], attrs["splits"]
    first, last = visible_range(position, attrs.get("window"))
    chunk = -(-(last - first) // splits)
    result = np.zeros((tokens, heads, splits, head_dim + PARTIAL_EXTRA), scores.dtype)
    result[..., head_dim] = -np.inf
    for split in range(splits):
        low, high = first + split * chunk, min(first + (split + 1) * chunk, last)
        if low >= high:
            continue  # nothing left for this split: acc 0, m −inf, l 0
        part = scores[..., low:high]
        top = part.max(-1)
        # A token may see nothing of this split; exp(−inf − 0) is the 0 it must count.
        weights = np.exp(part - np.where(np.isneginf(top), 0, top)[..., None])
        grouped = weights.reshape(values.shape[0], -1, *weights.shape[1:])
        acc = np.einsum("grts,gsd->tgrd", grouped, values[:, low:high], optimize=True)
        result[:, :, split, :head_dim] = acc.reshape(tokens, heads, head_dim)
        result[:, :, split, head_dim] = top.T
        result[:, :, split, head_dim + 1] = weights.sum(-1).T
    return result.reshape(*q.shape[:-1], -1)


def _combine_shape(types: Types, attrs: Attrs) -> TensorType:
    _value(types[0], "partial")
    per_head = partial_width(1, attrs["splits"], attrs["head_dim"])
    heads, rest = divmod(types[0].shape[-1], per_head)
    _need(not rest, f"{types[0]} is not a whole number of heads with {attrs['splits']} splits of {attrs['head_dim']} + 2")
    return TensorType((*types[0].shape[:-1], heads * attrs["head_dim"]), types[0].dtype)


def _combine(operands: Arrays, attrs: Attrs) -> np.ndarray:
    (partial,) = operands
    head_dim = attrs["head_dim"]
    parts = partial.reshape(*partial.shape[:-1], -1, attrs["splits"], head_dim + PARTIAL_EXTRA)
    top, weight = parts[..., head_dim], parts[..., head_dim + 1]
    # An empty split has m = −inf; its share is set to 0 outright, since exp(−inf − −inf) would be NaN.
    share = np.where(np.isneginf(top), 0, np.exp(top - top.max(-1, keepdims=True)))
    acc = (parts[..., :head_dim] * share[..., None]).sum(-2)
    return (acc / (weight * share).sum(-1)[..., None]).reshape(*partial.shape[:-1], -1)


register(OpRow(
    "attention_partial", ("q", "keys", "values", "position"),
    {"heads": "int", "kv_heads": "int", "head_dim": "int", "scale": "float", "window": "int | None",
     "softcap": "float | None", "splits": "int"},
    _partial_shape, _partial, "core",
    "Attention with the step's visible positions cut into ``splits`` equal chunks (the last ones may be short or empty). "
    "Per head and split: head_dim accumulated values, their maximum score m, the sum of weights l; an empty split is "
    "0, −inf, 0. Heads of a lane, then splits, then head_dim + 2 lie side by side.",
))
register(OpRow(
    "attention_combine", ("partial",), {"head_dim": "int", "splits": "int"}, _combine_shape, _combine, "whole",
    "Splits merged to the attention output: Σ acc·exp(m − max m) / Σ l·exp(m − max m), per head.",
))
