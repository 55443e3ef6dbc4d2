"""KV caches: buffers written at the step's positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, describe, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, paired
from kogc.ir.passes.recognize.values import Cache, Static, Value
from kogc.ir.types import TensorType


def append(context: Context, node: Node, cache: Value, axis: int, index: Value, value: Value) -> Cache:
    """``cache`` with ``value`` written along ``axis`` at ``index``."""
    if not isinstance(cache, Cache) or cache.factor != 1:
        raise NotUnderstood(f"{describe(cache)} is written at an index; only KV caches can be")
    if not isinstance(index, Static) or not context.functions.is_position(index.name):
        raise NotUnderstood("a KV cache is written at slots other than the step's positions")
    if cache.layout.offset or cache.layout.dims[axis] != (Atom(cache.head_dim, cache.capacity),):
        raise NotUnderstood("a KV cache is written along another dimension than its positions")
    x = context.whole(value)
    if x.space.row != cache.kv_heads * cache.head_dim:
        raise NotUnderstood(f"{x.space.row} elements per token are written into a KV cache of {cache.kv_heads} heads of {cache.head_dim}")
    rank = len(cache.layout.dims)
    dims = ((),) * (rank - len(x.layout.dims)) + x.layout.dims
    for place, (dim, held) in enumerate(zip(dims, cache.layout.dims, strict=True)):
        wanted = (x.space.token_atom,) if place == axis % rank else tuple(_in_row(cache, atom) for atom in held)
        if any(a != b for a, b in paired(dim, wanted)):
            raise NotUnderstood("the elements written into a KV cache are not in the order of its heads (heads repeated before caching?)")
    kind = TensorType((cache.kv_heads, cache.capacity, cache.head_dim), context.builder[cache.node].type.dtype)
    name = context.builder.emit("kv_append", (cache.node, x.node, context.leaf("position")), {}, kind, node)
    return replace(cache, node=name)


def _in_row(cache: Cache, atom: Atom) -> Atom:
    """An atom of the cache over the row of one position, [kv_heads · head_dim]."""
    if atom.stride < cache.head_dim:
        return atom
    return Atom(atom.stride // cache.capacity, atom.size)


@rule("index_copy")
def index_copy(context: Context, node: Node, cache: Value, dim: int, index: Value, value: Value) -> Value:
    return append(context, node, cache, dim, index, value)


@rule("index_put")
def index_put(
    context: Context, node: Node, cache: Value, indices: Sequence[Value | None], value: Value, accumulate: bool = False
) -> Value:
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    if accumulate or len(indexed) != 1:
        raise NotUnderstood("a KV cache must be written by one index, without accumulation")
    return append(context, node, cache, indexed[0], indices[indexed[0]], value)


@rule("select_scatter")
def select_scatter(context: Context, node: Node, whole: Value, part: Value, dim: int, index: int) -> Value:
    return _written_through(whole, part, whole.layout.dims[dim] if isinstance(whole, Cache) else None)


@rule("slice_scatter")
def slice_scatter(context: Context, node: Node, whole: Value, part: Value, dim: int = 0, *_: object, **__: object) -> Value:
    complete = isinstance(whole, Cache) and isinstance(part, Cache) and whole.layout.shape == part.layout.shape
    return _written_through(whole, part, () if complete else None)


@rule("copy")
def copy(context: Context, node: Node, cache: Value, value: Value, *_: object) -> Value:
    """A whole cache is overwritten by a version of itself, as steps do whose caches are arguments and results."""
    if not isinstance(cache, Cache) or not isinstance(value, Cache):
        raise NotUnderstood(f"{describe(cache)} is overwritten by {describe(value)}; only KV caches can be, by what the step made of them")
    return _written_through(cache, value, () if cache.layout.shape == value.layout.shape else None)


def _written_through(whole: Value, part: Value, dim: tuple | None) -> Cache:
    """A cache after a view of all of it was written."""
    if dim != () or not isinstance(whole, Cache) or not isinstance(part, Cache):
        raise NotUnderstood("only a part of a KV cache is written, or it is written at a Python number")
    return replace(part, layout=whole.layout)
