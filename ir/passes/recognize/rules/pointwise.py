"""Element-by-element arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, describe, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout, aligned, gaps
from kogc.ir.passes.recognize.rules import attention
from kogc.ir.passes.recognize.rules.embedding import add_table
from kogc.ir.passes.recognize.rules.movement import pending, viewed
from kogc.ir.passes.recognize.values import Act, Cache, Pending, Scores, Static, Value, Weight
from kogc.ir.passes.recognize.vectors import vector_of


# ── two activations ──


def together(context: Context, node: Node, op: str, one: Value, other: Value) -> Act:
    """A pointwise op on two activations; the narrower one is broadcast, over the lanes by an op of its own."""
    one, other = context.whole(one), context.whole(other)
    lanes = one.space.lanes or other.space.lanes
    if lanes is not None:
        one, other = context.with_lanes(one, lanes, node), context.with_lanes(other, lanes, node)
    if one.space != other.space:
        raise NotUnderstood(f"values of {_size(one)} and {_size(other)} are combined element by element")
    layout = _common(one.layout, other.layout)
    if gaps(layout.atoms, one.space.total) is None:
        raise NotUnderstood("two activations are combined in different arrangements of their features")
    return context.act(op, (one.node, other.node), {}, one.space, layout, node, repeats=True)


def _size(x: Act) -> str:
    return f"{x.space.features} features" + (f" on {x.space.lanes} lanes" if x.space.lanes else "")


def _common(one: Layout, other: Layout) -> Layout:
    """The layout in which both operands are seen; where one is broadcast the other's atoms count."""
    pairs = aligned(one, other)
    if any(a.stride and b.stride and a.stride != b.stride for dim in pairs for a, b in dim):
        raise NotUnderstood("two activations are combined in different arrangements of their features")
    return Layout(()).with_dims((a if a.stride else b for a, b in dim) for dim in pairs)


# ── an activation and something else ──


def with_vector(context: Context, node: Node, op: str, x: Value, weight: Weight) -> Act:
    """x combined with a weight vector: one element per feature, or per lane and feature."""
    x = context.whole(x)
    vector, x, layout = vector_of(context, node, x, weight)
    group = context.builder[vector].type.shape[-1]
    attrs = {"offset": weight.offset or None, "group": group if group != x.space.features else None}
    return context.act(op, (x.node, vector), attrs, x.space, layout, node, repeats=True)


def with_number(context: Context, node: Node, op: str, x: Value, **attrs: Any) -> Act:
    x = context.whole(x)
    return context.act(op, (x.node,), attrs, x.space, x.layout, node, repeats=True)


def scaled(context: Context, node: Node, x: Value, factor: float) -> Value:
    """x times a number. Parts of a rotary embedding may be negated before they are complete."""
    if isinstance(x, Scores):
        return x.then("scale", factor)
    if isinstance(x, Cache):
        return replace(x, factor=x.factor * factor)
    if factor == 1:
        return viewed(node, x, lambda layout: layout)
    if isinstance(x, Pending) or (isinstance(x, Act) and not context.is_whole(x)):
        if factor == -1:
            return pending(node, x)
        try:
            x = context.whole(x)
        except NotUnderstood:
            return pending(node, x)
    if isinstance(x, Weight):
        raise NotUnderstood("a weight is multiplied by a number")
    return with_number(context, node, "scale", x, factor=factor)


# ── rules ──


def _is_act(value: Any) -> bool:
    return isinstance(value, Act | Pending)


@rule("mul", "multiply")
def mul(context: Context, node: Node, a: Any, b: Any) -> Value:
    if isinstance(b, Act | Pending | Scores | Cache) and not isinstance(a, Act | Pending | Scores | Cache):
        a, b = b, a
    number = context.number(b)
    if number is not None:
        return scaled(context, node, a, number)
    if _is_act(a) and _is_act(b):
        return together(context, node, "mul", a, b)
    if _is_act(a) and isinstance(b, Weight):
        return with_vector(context, node, "lift.vec_mul", a, b)
    if _is_act(a) and isinstance(b, Static):
        return pending(node, a)
    raise NotUnderstood(f"{describe(a)} is multiplied by {describe(b)}")


@rule("div", "divide", "true_divide")
def div(context: Context, node: Node, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        raise NotUnderstood("a quotient is rounded")
    number = context.number(b)
    if number is not None:
        return scaled(context, node, a, 1.0 / number)
    if not _is_act(b):
        raise NotUnderstood(f"something is divided by {describe(b)}")
    inverse = with_number(context, node, "lift.fn", b, fn="reciprocal")
    return mul(context, node, a, inverse)


@rule("add")
def add(context: Context, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return _sum(context, node, a, b, float(alpha))


@rule("sub", "subtract")
def sub(context: Context, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return _sum(context, node, a, b, -float(alpha))


@rule("rsub")
def rsub(context: Context, node: Node, a: Any, b: Any, alpha: float = 1) -> Value:
    if alpha != 1:
        raise NotUnderstood("rsub with a factor")
    return _sum(context, node, b, a, -1.0)


def _sum(context: Context, node: Node, a: Any, b: Any, factor: float) -> Value:
    """a + factor · b."""
    if isinstance(a, Scores) or isinstance(b, Scores):
        return attention.biased(context, node, a, b, factor)
    if _is_act(a) and _is_act(b):
        return _sum_of_acts(context, node, a, b, factor)
    if not _is_act(a) and factor != 1 and _is_act(b):
        a, b, factor = scaled(context, node, b, factor), a, 1.0
    elif factor == 1 and (_is_act(b) or not isinstance(a, Act | Pending | Weight)):
        a, b = b, a
    number = context.number(b)
    if number is not None:
        if isinstance(a, Weight):
            return replace(a, offset=a.offset + factor * number)
        return with_number(context, node, "lift.add_scalar", a, number=factor * number)
    if factor == 1 and isinstance(b, Weight):
        return with_vector(context, node, "lift.vec_add", a, b)
    if factor == 1 and _is_act(a) and isinstance(b, Static):
        x = context.whole(a)
        return together(context, node, "add", x, add_table(context, node, x, b))
    raise NotUnderstood(f"{describe(a)} and {describe(b)} are added")


def _sum_of_acts(context: Context, node: Node, a: Value, b: Value, factor: float) -> Value:
    if _partial(context, a) and _partial(context, b) and _base(a) == _base(b) and abs(factor) == 1:
        return pending(node, a, b)
    if factor == 1:
        return together(context, node, "add", a, b)
    if factor == -1:
        return together(context, node, "lift.sub", a, b)
    return together(context, node, "add", a, scaled(context, node, b, factor))


def _partial(context: Context, value: Value) -> bool:
    return isinstance(value, Pending) or not context.is_whole(value)


def _base(value: Value) -> str:
    return value.base if isinstance(value, Pending) else value.node


@rule("pow")
def power(context: Context, node: Node, x: Value, exponent: Any) -> Value:
    number = context.number(exponent)
    if not _is_act(x) or number is None:
        raise NotUnderstood("only activations can be raised to a constant power")
    if number == 2:
        return together(context, node, "mul", x, x)
    named = {-0.5: "rsqrt", 0.5: "sqrt", -1.0: "reciprocal"}.get(number)
    if named:
        return with_number(context, node, "lift.fn", x, fn=named)
    return with_number(context, node, "lift.pow", x, exponent=number)


@rule("square")
def square(context: Context, node: Node, x: Value) -> Value:
    return together(context, node, "mul", x, x)


@rule("neg")
def neg(context: Context, node: Node, x: Value) -> Value:
    return scaled(context, node, x, -1.0)


@rule("rsqrt", "sqrt", "reciprocal", "exp", "erf", "abs")
def helper_function(context: Context, node: Node, x: Value) -> Value:
    return with_number(context, node, "lift.fn", x, fn=node.op.removeprefix("aten."))


@rule("silu", "relu", "sigmoid")
def activation(context: Context, node: Node, x: Value) -> Value:
    return with_number(context, node, "activation", x, fn=node.op.removeprefix("aten."))


@rule("tanh")
def tanh(context: Context, node: Node, x: Value) -> Value:
    return x.then("tanh") if isinstance(x, Scores) else with_number(context, node, "activation", x, fn="tanh")


@rule("gelu")
def gelu(context: Context, node: Node, x: Value, approximate: str = "none") -> Value:
    return with_number(context, node, "activation", x, fn="gelu_tanh" if approximate == "tanh" else "gelu")


@rule("glu")
def glu(context: Context, node: Node, x: Value, dim: int = -1) -> Value:
    half = context.graph[node.inputs[0]].type.shape[dim] // 2
    first = viewed(node, x, lambda layout: layout.sliced(dim % len(layout.dims), 0, half))
    second = viewed(node, x, lambda layout: layout.sliced(dim % len(layout.dims), half, half))
    return together(context, node, "mul", first, with_number(context, node, "activation", second, fn="sigmoid"))


