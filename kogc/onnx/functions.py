"""What each decode op computes, in standard ONNX ops of opset 20: the bodies of the functions in the domain ``kogc``.

A builder gets the body, the node (op, attributes, types) and the names of its operands, and returns the name of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.types import TensorType
from kogc.onnx.body import Body

Builder = Callable[[Body, Node, Sequence[TensorType], Sequence[str]], str]
BUILDERS: dict[str, Builder] = {}


def builder(*ops: str) -> Callable[[Builder], Builder]:
    def register(function: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(ops, function))
        return function

    return register


# ── norms ──


def _keeping(kind: TensorType, last: Sequence[int]) -> list[int]:
    """A shape for Reshape: the dimensions before the features as they are, then ``last``."""
    return [0] * (len(kind.shape) - 1) + list(last)


def _in_groups(body: Body, node: Node, x: str) -> str:
    group, features = node.attrs.get("group"), node.type.shape[-1]
    return body.reshape(x, _keeping(node.type, [features // group, group])) if group else x


def _whole(body: Body, node: Node, x: str) -> str:
    return body.reshape(x, _keeping(node.type, [node.type.shape[-1]])) if node.attrs.get("group") else x


def _times_vectors(body: Body, node: Node, unit: str, types: Sequence[TensorType], vectors: Sequence[str]) -> str:
    """``unit`` (in groups) times the scale, plus the bias: each of one group's length, or as wide as all."""
    group, whole = node.attrs.get("group"), not node.attrs.get("group")
    for kind, vector, op in zip(types, vectors, ("Mul", "Add"), strict=False):
        if op == "Mul" and node.attrs.get("scale_offset"):
            vector = body.op("Add", vector, body.number(node.attrs["scale_offset"]))
        if not whole and kind.shape != (group,):
            unit, whole = _whole(body, node, unit), True
        unit = body.op(op, unit, vector)
    return unit if whole else _whole(body, node, unit)


@builder("rms_norm")
def rms_norm(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    x = _in_groups(body, node, inputs[0])
    square = body.op("Add", body.mean(body.op("Mul", x, x)), body.number(node.attrs["eps"]))
    return _times_vectors(body, node, body.op("Div", x, body.op("Sqrt", square)), types[1:], inputs[1:])


@builder("layer_norm")
def layer_norm(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    x = _in_groups(body, node, inputs[0])
    centred = body.op("Sub", x, body.mean(x))
    variance = body.op("Add", body.mean(body.op("Mul", centred, centred)), body.number(node.attrs["eps"]))
    return _times_vectors(body, node, body.op("Div", centred, body.op("Sqrt", variance)), types[1:], inputs[1:])


# ── attention ──


@builder("rope")
def rope(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    x, cos, sin, position = inputs
    head_dim, turning = node.attrs["head_dim"], node.attrs["rotary_dim"]
    heads = body.reshape(x, [0, -1, head_dim])
    c, s = (body.unsqueeze(body.floats(body.op("Gather", table, position, axis=0)), 1) for table in (cos, sin))
    first, second = _pairs(body, node, heads)
    one = body.op("Sub", body.op("Mul", first, c), body.op("Mul", second, s))
    two = body.op("Add", body.op("Mul", second, c), body.op("Mul", first, s))
    if node.attrs["style"] == "half":
        turned = body.op("Concat", one, two, axis=2)
    else:
        stacked = body.op("Concat", body.unsqueeze(one, 3), body.unsqueeze(two, 3), axis=3)
        turned = body.reshape(stacked, [0, 0, turning])
    if turning < head_dim:
        turned = body.op("Concat", turned, body.slice(heads, 2, turning, head_dim), axis=2)
    return body.reshape(turned, [0, *node.type.shape[1:]])


def _pairs(body: Body, node: Node, heads: str) -> tuple[str, str]:
    """First and second feature of every pair that turns, [T, heads, rotary_dim / 2]."""
    turning = node.attrs["rotary_dim"]
    if node.attrs["style"] == "half":
        return body.slice(heads, 2, 0, turning // 2), body.slice(heads, 2, turning // 2, turning)
    return tuple(body.op("Gather", heads, body.const(np.arange(start, turning, 2)), axis=2) for start in (0, 1))


@builder("kv_append")
def kv_append(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    cache, x, position = inputs
    kv_heads, _, head_dim = node.type.shape
    fresh = body.reshape(x, [0, kv_heads, head_dim])
    by_position = body.op("Transpose", cache, perm=[1, 0, 2])
    written = body.op("ScatterND", by_position, body.unsqueeze(position, 1), fresh)
    return body.op("Transpose", written, perm=[1, 0, 2])


@builder("attention")
def attention(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    q, keys, values, position = inputs
    attrs, capacity = node.attrs, types[1].shape[1]
    kv_heads, head_dim = attrs["kv_heads"], attrs["head_dim"]
    grouped = body.op("Transpose", body.reshape(q, [0, kv_heads, attrs["heads"] // kv_heads, head_dim]), perm=[1, 2, 0, 3])
    turned = body.unsqueeze(body.op("Transpose", keys, perm=[0, 2, 1]), 1)
    scores = body.op("Mul", body.op("MatMul", grouped, turned), body.number(attrs["scale"]))
    if attrs.get("softcap"):
        scores = _capped(body, scores, attrs["softcap"])
    visible = _visible(body, position, capacity, attrs.get("window"))
    weights = body.op("Softmax", body.op("Where", visible, scores, body.number(-np.inf)), axis=-1)
    mixed = body.op("MatMul", weights, body.unsqueeze(values, 1))
    return body.reshape(body.op("Transpose", mixed, perm=[2, 0, 1, 3]), [0, *node.type.shape[1:]])


def _visible(body: Body, position: str, capacity: int, window: int | None) -> str:
    """bool [T, capacity]."""
    age = body.op("Sub", body.unsqueeze(position, 1), body.const(np.arange(capacity)))
    visible = body.op("GreaterOrEqual", age, body.const(0))
    return body.op("And", visible, body.op("Less", age, body.const(window))) if window else visible


def _capped(body: Body, x: str, cap: float) -> str:
    return body.op("Mul", body.op("Tanh", body.op("Div", x, body.number(cap))), body.number(cap))


# ── pointwise ──

#: Activations that are one standard op, with its attributes.
STANDARD = {
    "relu": ("Relu", {}), "sigmoid": ("Sigmoid", {}), "tanh": ("Tanh", {}), "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
}  # fmt: skip


def _activated(body: Body, fn: str, x: str) -> str:
    if fn == "silu":
        return body.op("Mul", x, body.op("Sigmoid", x))
    kind, attributes = STANDARD[fn]
    return body.op(kind, x, **attributes)


@builder("activation")
def activation(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    return _activated(body, node.attrs["fn"], inputs[0])


@builder("gated_activation")
def gated_activation(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    return body.op("Mul", _activated(body, node.attrs["fn"], inputs[0]), inputs[1])


@builder("softcap")
def softcap(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    return _capped(body, inputs[0], node.attrs["cap"])


# ── lanes ──


@builder("lane_others")
def lane_others(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    return body.op("Sub", body.op("ReduceSum", inputs[0], body.const([1]), keepdims=1), inputs[0])


@builder("lane_broadcast")
def lane_broadcast(body: Body, node: Node, types: Sequence[TensorType], inputs: Sequence[str]) -> str:
    return body.op("Tile", body.unsqueeze(inputs[0], 1), body.const([1, node.attrs["lanes"], 1]))
