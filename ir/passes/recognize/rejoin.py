"""Norms that every head has of its own, one after the other, as one norm over groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.layout import Atom, Layout
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.passes.recognize.values import Act, Space, Value
from kogc.ir.types import TensorType

_NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True)
class _Range:
    """Outputs ``first:last`` of one linear layer (with its bias): ``source`` is equal for ranges of the same one."""

    source: object
    first: int
    last: int


def rejoined(context: Context, node: Node, parts: Sequence[Value], dim: int) -> Act | None:
    """``parts`` side by side along ``dim`` as one value, where they are norms of neighbouring outputs of one linear layer."""
    builder = context.builder
    if not all(isinstance(part, Act) and context.is_whole(part) and builder[part.node].op in _NORMS for part in parts):
        return None
    norms = [builder[part.node] for part in parts]
    ranges = [_range(builder, norm.inputs[0]) for norm in norms]
    alike = len({(part.space, part.layout, norm.op, len(norm.inputs), tuple(norm.attrs.items())) for part, norm in zip(parts, norms, strict=True)}) == 1
    first = parts[0]
    if not alike or norms[0].attrs.get("group") or first.space.lanes or first.layout.dims[dim] or not _follow(ranges):
        return None
    size, count = first.space.features, len(parts)
    source = _outputs(builder, norms[0].inputs[0], ranges[0].first, ranges[-1].last)
    vectors = (_joined(builder, [norm.inputs[slot] for norm in norms]) for slot in range(1, len(norms[0].inputs)))
    space = Space(first.space.tokens, None, size * count)
    attrs = {**norms[0].attrs, "group": size}
    name = builder.emit(norms[0].op, (source, *vectors), attrs, builder.value_type(None, space.features), node)
    moved = first.space.moved(first.layout, space)
    dims = list(moved.dims)
    dims[dim] = (Atom(size, count),)
    return context.seen(name, space, replace(Layout(()).with_dims(dims), offset=moved.offset))


def _range(builder: Builder, name: str) -> _Range | None:
    node = builder[name]
    if node.op == "linear" and len(node.inputs) == 2 and node.attrs.get("rows"):
        return _Range(node.inputs, *node.attrs["rows"])
    if node.op == "lift.vec_add" and not node.attrs.get("offset"):
        inner, bias = _range(builder, node.inputs[0]), builder[node.inputs[1]]
        if inner is not None and bias.attrs.get("rows") == (inner.first, inner.last):
            return _Range((inner.source, bias.attrs["key"]), inner.first, inner.last)
    return None


def _follow(ranges: Sequence[_Range | None]) -> bool:
    """Whether these are neighbours of one source, in their order."""
    pairs = zip(ranges, ranges[1:])
    return None not in ranges and all(one.source == other.source and one.last == other.first for one, other in pairs)


def _outputs(builder: Builder, name: str, first: int, last: int) -> str:
    """What ``name`` is a range of, from ``first`` to ``last``."""
    node = builder[name]
    kind = TensorType((*node.type.shape[:-1], last - first), node.type.dtype)
    if node.op == "linear":
        whole = (first, last) == (0, builder[node.inputs[1]].type.shape[-2])
        return builder.emit("linear", node.inputs, {"rows": None if whole else (first, last)}, kind, node)
    bias = builder[node.inputs[1]]
    vector = builder.emit("weight", (), {**bias.attrs, "rows": (first, last)}, TensorType((last - first,), bias.type.dtype), bias)
    return builder.emit(node.op, (_outputs(builder, node.inputs[0], first, last), vector), node.attrs, kind, node)


def _joined(builder: Builder, names: Sequence[str]) -> str:
    """One leaf for weight vectors that lie one after the other."""
    leaves = [builder[name] for name in names]
    kind = TensorType((sum(leaf.type.shape[0] for leaf in leaves),), leaves[0].type.dtype)
    keys = tuple(leaf.attrs["key"] for leaf in leaves)
    return builder.emit("weight", (), {"key": keys[0], "joined": keys}, kind, leaves[0])
