"""Weight vectors that go with an activation element by element: norm scales and biases."""

from __future__ import annotations

from math import prod

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout, aligned, gaps
from kogc.ir.passes.recognize.values import Act, Weight
from kogc.ir.types import TensorType


def vector_of(context: Context, node: Node, x: Act, weight: Weight) -> tuple[str, Act, Layout]:
    """The lifted weight leaf, x (with lanes if the vector has them) and the layout of the result.

    The leaf is [features], [lanes, features], or shorter when every group of neighbouring features shares it.
    Raises NotUnderstood when the weight does not lie along the features.
    """
    pairs = aligned(x.layout, weight.layout)
    lanes = [b.size for dim in pairs for a, b in dim if b.stride >= x.space.features and not a.stride]
    if x.space.lanes is None and lanes:
        return vector_of(context, node, context.with_lanes(x, prod(lanes), node), weight)
    if any(a.stride and b.stride and a.stride != b.stride for dim in pairs for a, b in dim):
        raise NotUnderstood(f"weight {weight.leaf} {list(weight.stored)} does not lie along the features it is combined with")
    layout = Layout(()).with_dims((b if b.stride else a for a, b in dim) for dim in pairs)
    used = [b for dim in pairs for _, b in dim if b.stride]
    count = prod(atom.size for atom in used)
    along_row = count == x.space.row or count == x.space.features or x.space.features % count == 0
    if gaps(layout.atoms, x.space.total) is None or gaps(used, count) != () or not along_row:
        raise NotUnderstood(f"weight {weight.leaf} {list(weight.stored)} does not lie along the features it is combined with")
    return _leaf(context, weight, count, x), x, layout


def _leaf(context: Context, weight: Weight, count: int, x: Act) -> str:
    laned = x.space.lanes is not None and count == x.space.row
    rows = None if count == prod(weight.stored) else (weight.layout.offset, weight.layout.offset + count)
    if rows and laned:
        raise NotUnderstood(f"a part of weight {weight.leaf} {list(weight.stored)} is used as a vector of every lane")
    shape = (x.space.lanes, x.space.features) if laned else (count,)
    kind = TensorType(shape, context.graph_dtype(weight.leaf))
    return context.leaf("weight", weight.leaf, kind, **({"rows": rows} if rows else {}))
