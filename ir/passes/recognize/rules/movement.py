"""Views, slices and copies: they change the layout of a value and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, describe, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Layout
from kogc.ir.passes.recognize.rejoin import rejoined
from kogc.ir.passes.recognize.values import Act, Cache, Pending, Scores, Several, Static, Token, Value, Weight


def viewed(node: Node, value: Value, change: Callable[[Layout], Layout]) -> Value:
    """``value`` with its layout changed. What has no layout stays as it is: ids, and pending values, which are probed."""
    if isinstance(value, Act | Weight | Cache | Scores):
        return replace(value, layout=change(value.layout))
    if isinstance(value, Pending):
        return Pending(node.name, value.base)
    if isinstance(value, Token):
        return value
    raise NotUnderstood(f"{describe(value)} cannot be rearranged")


@rule("dropout")
def dropout(context: Context, node: Node, x: Value, rate: float, active: bool) -> Value:
    if active and rate:
        raise NotUnderstood("dropout is active in evaluation mode (F.dropout without training=self.training)")
    return same(context, node, x)


@rule("to", "contiguous", "clone", "alias", "detach", "lift_fresh_copy")
def same(context: Context, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    """Copies and float casts change no value."""
    if not isinstance(x, Token) and not (node.type.is_float or node.type.dtype.startswith("complex")):
        raise NotUnderstood(f"{describe(x)} is cast to {node.type.dtype}")
    return viewed(node, x, lambda layout: layout)


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def reshape(context: Context, node: Node, x: Value, *_: Any) -> Value:
    return viewed(node, x, lambda layout: layout.reshaped(node.type.shape))


@rule("transpose", "swapaxes", "swapdims")
def transpose(context: Context, node: Node, x: Value, one: int, other: int) -> Value:
    return viewed(node, x, lambda layout: layout.swapped(one, other))


@rule("t", "mT", "numpy_T")
def turn(context: Context, node: Node, x: Value) -> Value:
    def change(layout: Layout) -> Layout:
        if len(layout.dims) < 2:
            return layout
        return layout.permuted(range(len(layout.dims))[::-1]) if node.op == "aten.numpy_T" else layout.swapped(-2, -1)

    return viewed(node, x, change)


@rule("permute")
def permute(context: Context, node: Node, x: Value, order: Sequence[int]) -> Value:
    return viewed(node, x, lambda layout: layout.permuted(order))


@rule("movedim")
def movedim(context: Context, node: Node, x: Value, source: int | Sequence[int], target: int | Sequence[int]) -> Value:
    def change(layout: Layout) -> Layout:
        count = len(layout.dims)
        sources = [s % count for s in ([source] if isinstance(source, int) else source)]
        targets = [t % count for t in ([target] if isinstance(target, int) else target)]
        order = [axis for axis in range(count) if axis not in sources]
        for place, axis in sorted(zip(targets, sources, strict=True)):
            order.insert(place, axis)
        return layout.permuted(order)

    return viewed(node, x, change)


@rule("expand", "expand_as")
def expand(context: Context, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return viewed(node, x, lambda layout: layout.expanded(node.type.shape))


@rule("repeat", "tile")
def repeat(context: Context, node: Node, x: Value, times: Sequence[int]) -> Value:
    def change(layout: Layout) -> Layout:
        layout = layout.expanded((1,) * (len(times) - len(layout.dims)) + layout.shape)
        for axis, count in enumerate((1,) * (len(layout.dims) - len(times)) + tuple(times)):
            layout = layout.repeated(axis, count, inner=False)
        return layout

    return viewed(node, x, change)


@rule("repeat_interleave")
def repeat_interleave(
    context: Context, node: Node, x: Value, times: int, dim: int | None = None, output_size: int | None = None
) -> Value:
    if not isinstance(times, int) or dim is None:
        raise NotUnderstood("repeat_interleave needs one number of repeats and a dimension")
    return viewed(node, x, lambda layout: layout.repeated(dim, times, inner=True))


# ── parts ──


def part(context: Context, node: Node, x: Value, dim: int, start: int, count: int, step: int = 1) -> Value:
    """``count`` elements of dimension ``dim``."""
    of_tokens = isinstance(x, Act) and x.space.token_atom in x.layout.dims[dim] or isinstance(x, Token)
    if of_tokens and count < _size(context, node, dim):
        raise NotUnderstood("a part of the step's tokens is selected; every token of a step needs its logits")
    if count == 0 and isinstance(x, Act):
        return pending(node, x)  # nothing passes through a rotary embedding: it will be joined to something
    return viewed(node, x, lambda layout: layout.sliced(dim % len(layout.dims), start, count, step))


def _size(context: Context, node: Node, dim: int) -> int:
    return context.graph[node.inputs[0]].type.shape[dim]


@rule("slice")
def slice_(
    context: Context, node: Node, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    first, last, step = slice(start, end, step).indices(_size(context, node, dim))
    return part(context, node, x, dim, first, max(0, -(-(last - first) // step)), step)


@rule("narrow")
def narrow(context: Context, node: Node, x: Value, dim: int, start: int, count: int) -> Value:
    if isinstance(start, Value):
        raise NotUnderstood("a part at a computed place is taken")
    return part(context, node, x, dim, start % _size(context, node, dim), count)


@rule("select")
def select(context: Context, node: Node, x: Value, dim: int, index: int) -> Value:
    if isinstance(index, Value):
        raise NotUnderstood("an element at a computed place is taken")
    taken = part(context, node, x, dim, index % _size(context, node, dim), 1)
    return viewed(node, taken, lambda layout: layout.reshaped(node.type.shape))


@rule("split", "split.sizes", "split_with_sizes")
def split(context: Context, node: Node, x: Value, sizes: int | Sequence[int], dim: int = 0) -> Value:
    total = _size(context, node, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    return _parts(context, node, x, sizes, dim)


@rule("chunk")
def chunk(context: Context, node: Node, x: Value, chunks: int, dim: int = 0) -> Value:
    return split(context, node, x, max(1, -(-_size(context, node, dim) // chunks)), dim)


@rule("unbind")
def unbind(context: Context, node: Node, x: Value, dim: int = 0) -> Value:
    taken = _parts(context, node, x, [1] * _size(context, node, dim), dim)
    if not isinstance(taken, Several):
        return taken
    axis = dim % len(context.graph[node.inputs[0]].type.shape)

    def without_axis(layout: Layout) -> Layout:
        return replace(layout, dims=layout.dims[:axis] + layout.dims[axis + 1 :])

    return Several(tuple(viewed(node, value, without_axis) for value in taken.values))


def _parts(context: Context, node: Node, x: Value, sizes: Sequence[int], dim: int) -> Value:
    if isinstance(x, Pending):
        return Pending(node.name, x.base)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return Several(tuple(part(context, node, x, dim, start, count) for start, count in zip(starts, sizes, strict=True)))


@rule("getitem")
def getitem(context: Context, node: Node, x: Value, index: int) -> Value:
    if isinstance(x, Several):
        return x.values[index]
    return Pending(node.name, x.base) if isinstance(x, Pending) else Static(node.name)


# ── what only rotary embeddings do to activations ──


@rule("cat", "concat", "stack")
def join(context: Context, node: Node, parts: Sequence[Value], dim: int = 0) -> Value:
    """Parts of one value may be joined again; they stay pending until it is known what they make."""
    if len(parts) == 1:
        return reshape(context, node, parts[0])
    found = rejoined(context, node, parts, dim) if node.op != "aten.stack" else None
    if found is not None:
        return found
    return pending(node, *parts)


def pending(node: Node, *values: Value) -> Pending:
    """The pending result of a linear op on values of one base."""
    bases = {value.base if isinstance(value, Pending) else value.node for value in values if isinstance(value, Act | Pending)}
    if len(bases) != 1 or not all(isinstance(value, Act | Pending) for value in values):
        raise NotUnderstood(f"{' and '.join(sorted({describe(v) for v in values}))} of different origin are put together")
    return Pending(node.name, bases.pop())


@rule("view_as_complex", "view_as_real", "real", "imag", "complex", "flip", "roll", "conj")
def linear_in_one(context: Context, node: Node, *args: Any, **_: Any) -> Value:
    return pending(node, *(value for value in args if isinstance(value, Value)))
