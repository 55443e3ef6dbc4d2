"""Cache leaves in their canonical shape."""

from __future__ import annotations

from math import prod

from kogc.ir.graph import Graph, Node
from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, Layout
from kogc.ir.passes.recognize.values import Cache
from kogc.ir.types import TensorType


def slot_axis(graph: Graph, leaf: Node) -> int:
    """The dimension of a cache leaf that counts positions: the one its first write indexes, else the last but one."""
    plain = Layout.contiguous(leaf.type.shape)
    waiting = [(leaf.name, plain)]
    while waiting:
        name, layout = waiting.pop(0)
        for user in graph.users(name):
            axis = _written_axis(user) if user.inputs[0] == name else None
            if axis is not None and layout.dims[axis] in plain.dims:
                return plain.dims.index(layout.dims[axis])
            seen = _seen_through(user, layout)
            if seen is not None:
                waiting.append((user.name, seen))
    return max(len(leaf.type.shape) - 2, 0)


def _written_axis(node: Node) -> int | None:
    """The dimension that a write indexes; None for other ops."""
    args = node.attrs.get("args", ())
    if node.op == "aten.index_copy":
        return args[1]
    if node.op == "aten.index_put":
        indexed = [axis for axis, index in enumerate(args[1]) if index is not None]
        return indexed[0] if len(indexed) == 1 else None
    return None


def _seen_through(node: Node, layout: Layout) -> Layout | None:
    """The layout of a view of the whole cache; None for other ops."""
    args = node.attrs.get("args", ())
    if len(node.inputs) != 1:
        return None
    if node.op in ("aten.transpose", "aten.swapaxes"):
        return layout.swapped(*args[1:3])
    if node.op == "aten.permute":
        return layout.permuted(args[1])
    if node.op.removeprefix("aten.") in ("view", "reshape", "squeeze", "unsqueeze", "select", "flatten", "unflatten"):
        return layout.reshaped(node.type.shape) if prod(layout.shape) == prod(node.type.shape) else None
    return None


def cache_leaf(context: Context, leaf: Node, dtype: str) -> Cache:
    """A cache leaf in its canonical shape [kv_heads, capacity, head_dim]; its own dimensions become the layout."""
    shape, slots = leaf.type.shape, slot_axis(context.graph, leaf)
    others = [axis for axis in range(len(shape)) if axis != slots]
    if len(others) < 2:
        raise NotUnderstood(f"a KV cache must be [kv_heads, capacity, head_dim], this one is {leaf.type}")
    capacity, head_dim = shape[slots], shape[others[-1]]
    strides = {slots: head_dim, others[-1]: 1}
    heads = 1
    for axis in reversed(others[:-1]):
        strides[axis] = heads * capacity * head_dim
        heads *= shape[axis]
    kind = TensorType((heads, capacity, head_dim), dtype)
    name = context.leaf("cache", leaf.attrs["key"], kind)
    layout = Layout(()).with_dims((Atom(strides[axis], size),) for axis, size in enumerate(shape))
    return Cache(name, heads, capacity, head_dim, layout, slots)
