"""Sums and means over features or lanes, and norms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout, gaps, joined
from kogc.ir.passes.recognize.rules.pointwise import scaled
from kogc.ir.passes.recognize.values import Act, Space, Value, Weight
from kogc.ir.passes.recognize.vectors import vector_of


@rule("mean", "sum")
def reduce(context: Context, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return _reduced(context, node, context.whole(x), node.op.removeprefix("aten."), dims, keepdim)


@rule("var")
def variance(
    context: Context, node: Node, x: Value, dims: Any = None, unbiased: bool | None = None, keepdim: bool = False,
    correction: float | None = None,
) -> Value:
    if isinstance(dims, bool):
        dims, unbiased = None, dims
    if unbiased is None and correction is None or unbiased or correction:
        raise NotUnderstood("a variance with Bessel's correction")
    return _reduced(context, node, context.whole(x), "var", dims, keepdim)


def _reduced(context: Context, node: Node, x: Act, what: str, dims: Any, keepdim: bool) -> Value:
    rank = len(x.layout.dims)
    axes = {axis % rank for axis in (range(rank) if dims is None else [dims] if isinstance(dims, int) else dims)}
    atoms = joined(sorted((atom for axis in axes for atom in x.layout.dims[axis] if atom.stride), reverse=True))
    repeats = prod(atom.size for axis in axes for atom in x.layout.dims[axis] if not atom.stride)
    left = [() if axis in axes else dim for axis, dim in enumerate(x.layout.dims) if keepdim or axis not in axes]
    layout = Layout(tuple(left))
    if atoms == () and what != "var":
        x = Act(x.node, x.space, layout)
        return scaled(context, node, x, float(repeats)) if what == "sum" else x
    if repeats != 1:
        raise NotUnderstood(f"a {what} over a broadcast dimension together with another")
    if atoms == (x.space.lane_atom,) and x.space.lanes is not None and what != "var":
        space = Space(x.space.tokens, None, x.space.features)
        return context.act(f"lane_{what}", (x.node,), {}, space, x.space.moved(layout, space), node, repeats=True)
    group = prod(atom.size for atom in atoms)
    if gaps(atoms, group) != () or x.space.features % group:
        raise NotUnderstood(f"a {what} over something other than all lanes, or all features of a token or head")
    attrs = {"group": None if group == x.space.features else group}
    return context.act(f"lift.{what}", (x.node,), attrs, x.space, layout, node, repeats=True)


def _norm(context: Context, node: Node, x: Value, shape: Sequence[int], op: str, vectors: Sequence[Any], eps: float) -> Act:
    x = context.whole(x)
    offset = vectors[0].offset if vectors and isinstance(vectors[0], Weight) else 0.0
    if offset and op != "rms_norm" or any(isinstance(vector, Weight) and vector.offset for vector in vectors[1:]):
        raise NotUnderstood(f"a number is added to a weight of {op}")
    group = prod(shape)
    dims = x.layout.dims[len(x.layout.dims) - len(shape) :]
    if gaps([atom for dim in dims for atom in dim], group) != () or x.space.features % group:
        raise NotUnderstood(f"a norm over {group} of {x.space.features} features per token that are no head")
    names = []
    for vector in vectors:
        if not isinstance(vector, Weight):
            raise NotUnderstood("a norm's scale or bias is not a weight")
        name, x, _ = vector_of(context, node, x, vector)
        names.append(name)
    attrs = {"eps": float(eps), "group": None if group == x.space.features else group, "scale_offset": offset or None}
    return context.act(op, (x.node, *names), attrs, x.space, x.layout, node)


@rule("rms_norm")
def rms_norm(context: Context, node: Node, x: Value, shape: Sequence[int], weight: Value | None = None, eps: float | None = None) -> Value:
    if eps is None:
        raise NotUnderstood("rms_norm without a recorded epsilon")
    return _norm(context, node, x, shape, "rms_norm", [] if weight is None else [weight], eps)


@rule("layer_norm")
def layer_norm(
    context: Context, node: Node, x: Value, shape: Sequence[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:
    if weight is None and bias is not None:
        raise NotUnderstood("layer_norm with a bias and no scale")
    return _norm(context, node, x, shape, "layer_norm", [vector for vector in (weight, bias) if vector is not None], eps)
