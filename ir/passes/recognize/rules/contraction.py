"""Products with weights: linear, matmul, bmm, addmm, einsum … all become ``linear``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context, describe, rule
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.layout import Atom, Dim, Layout, gaps, length, paired
from kogc.ir.passes.recognize.rules import attention
from kogc.ir.passes.recognize.rules.movement import pending
from kogc.ir.passes.recognize.rules.pointwise import add, with_vector
from kogc.ir.passes.recognize.values import Act, Cache, Pending, Scores, Space, Static, Value, Weight
from kogc.ir.types import TensorType


def product(context: Context, node: Node, a: Value, b: Value, labels: tuple[str, str, str]) -> Value:
    """The contraction of a and b; ``labels`` name the dimensions of a, b and the result as in einsum."""
    first, second, out = labels
    if isinstance(b, Act | Pending | Scores) and not isinstance(a, Act | Pending | Scores):
        return product(context, node, b, a, (second, first, out))
    if isinstance(a, Act | Pending) and isinstance(b, Weight):
        return linear(context, node, context.whole(a), b, labels)
    if isinstance(a, Act | Pending) and isinstance(b, Cache):
        return attention.scores(context, node, context.whole(a), b, labels)
    if isinstance(a, Scores) and isinstance(b, Cache):
        return attention.mixed(context, node, a, b, labels)
    if isinstance(a, Act | Pending) and isinstance(b, Static):
        return pending(node, a)
    if isinstance(a, Act | Pending) and isinstance(b, Act | Pending):
        raise NotUnderstood("two activations are multiplied as matrices; attention must read its keys and values from a KV cache")
    raise NotUnderstood(f"{describe(a)} is multiplied with {describe(b)} as a matrix")


@dataclass(frozen=True)
class _Block:
    """How a weight is stored: ``lanes`` blocks of [rows, width] (or [width, rows] when ``transposed``)."""

    lanes: int | None
    rows: int
    width: int
    transposed: bool


def linear(context: Context, node: Node, x: Act, weight: Weight, labels: tuple[str, str, str]) -> Act:
    """x · weightᵀ for any arrangement of dimensions in which every output is a product over all features of a token."""
    if weight.offset:
        raise NotUnderstood("a number is added to a weight matrix")
    xs, ws, out = labels
    _check_labels(xs, ws, out, dict(zip(xs + ws, x.layout.shape + weight.layout.shape, strict=True)))
    x_dims, w_dims = dict(zip(xs, x.layout.dims, strict=True)), dict(zip(ws, weight.layout.dims, strict=True))
    shared = [label for label in ws if label in xs and label in out and any(atom.stride for atom in w_dims[label])]
    x, x_dims = _on_lanes(context, node, x, x_dims, shared, w_dims)
    x, x_dims = _equal_lanes(context, node, x, x_dims, [label for label in ws if label in xs and label not in out])
    pairs = [pair for label in ws if label in xs and label not in out for pair in paired(x_dims[label], w_dims[label])]
    x = _features(context, node, x, [a for a, _ in pairs], bool(shared))
    block = _stored(weight, pairs, x.space.lanes)
    if any(w_dims[label] != (Atom(block.rows * block.width, block.lanes),) for label in shared):
        raise NotUnderstood(f"weight {weight.leaf} {list(weight.stored)} does not hold one block per lane, one after the other")
    fresh = {label: _outputs(block, w_dims[label]) for label in ws if label not in xs}
    used = prod(atom.size for dim in fresh.values() for atom in dim)
    first = weight.layout.offset if block.transposed else weight.layout.offset // block.width
    if gaps([atom for dim in fresh.values() for atom in dim], used) != () or first + used > block.rows:
        raise NotUnderstood(f"the rows taken from weight {weight.leaf} {list(weight.stored)} are not one contiguous range")
    space = Space(x.space.tokens, x.space.lanes, used)
    kept = {label: _kept(x.space, space, x_dims[label]) for label in xs if label in out and label not in shared}
    dims = {**kept, **fresh, **{label: (space.lane_atom,) for label in shared}}
    rows = None if used == block.rows else (first, first + used)
    layout = Layout(()).with_dims(dims[label] for label in out)
    return context.act("linear", (x.node, _leaf(context, weight, block)), {"rows": rows}, space, layout, node)


def _check_labels(xs: str, ws: str, out: str, sizes: dict[str, int]) -> None:
    if len(set(xs)) != len(xs) or len(set(ws)) != len(ws):
        raise NotUnderstood("a diagonal is taken in an einsum")
    for label in set(xs) ^ set(ws):
        if label not in out and sizes[label] > 1:
            raise NotUnderstood("an einsum sums over a dimension that only one operand has")


def _on_lanes(
    context: Context, node: Node, x: Act, dims: dict[str, Dim], shared: Sequence[str], w_dims: dict[str, Dim]
) -> tuple[Act, dict[str, Dim]]:
    """x with the lane axis that the weight's blocks ask for, and its dimensions."""
    if not shared:
        return x, dims
    if len(shared) > 1:
        raise NotUnderstood("a weight has more than one block dimension")
    (label,) = shared
    lanes = length(w_dims[label])
    if x.space.lanes is None:
        if any(atom.stride for atom in dims[label]):
            raise NotUnderstood("the features of one vector are dealt to blocks of a weight (a grouped linear layer is not supported)")
        labels = list(dims)
        x = context.with_lanes(x, lanes, node)
        dims = dict(zip(labels, x.layout.dims, strict=True)) | {label: (x.space.lane_atom,)}
    if dims[label] != (x.space.lane_atom,):
        raise NotUnderstood(f"a weight with {lanes} blocks meets an activation with another arrangement of its {x.space.lanes} lanes")
    return x, dims


def _equal_lanes(context: Context, node: Node, x: Act, dims: dict[str, Dim], summed: Sequence[str]) -> tuple[Act, dict[str, Dim]]:
    """x on lanes where the sum also runs over a broadcast of it: lanes that never came apart, side by side."""
    repeats = [atom for label in summed for atom in dims[label] if not atom.stride]
    if x.space.lanes is not None or len(repeats) != 1:
        return x, dims
    labels = list(dims)
    x = context.with_lanes(x, repeats[0].size, node)
    dims = dict(zip(labels, x.layout.dims, strict=True))
    spread = {label: tuple(atom if atom.stride else x.space.lane_atom for atom in dims[label]) for label in summed}
    return x, dims | spread


def _features(context: Context, node: Node, x: Act, summed: list[Atom], laned: bool) -> Act:
    """x such that the summed atoms are all its features: lanes side by side where the sum runs over lanes too."""
    count = prod(a.size for a in summed)
    if any(not a.stride for a in summed) or gaps(summed, count) != ():
        raise NotUnderstood("the sum does not run over the features of each token in their order")
    if x.space.lanes is not None and not laned:
        if count != x.space.row:
            raise NotUnderstood("a weight without lanes is applied to every lane")
        space = Space(x.space.tokens, None, x.space.row)
        name = context.builder.emit("lane_concat", (x.node,), {}, context.builder.value_type(None, space.features), node)
        return Act(name, space, x.layout)
    if count != x.space.features:
        raise NotUnderstood(f"the sum runs over {count} of {x.space.features} features (a linear layer per head is not supported)")
    return x


def _stored(weight: Weight, pairs: list[tuple[Atom, Atom]], lanes: int | None) -> _Block:
    """How the weight's stored array is laid out, from the strides of the summed dimension."""
    width = prod(a.size for a, _ in pairs)
    rows = prod(weight.stored) // width // (lanes or 1)
    factors = {b.stride // a.stride if b.stride % a.stride == 0 else None for a, b in pairs} or {1}
    if factors == {1}:
        return _Block(lanes, rows, width, transposed=False)
    if factors == {rows}:
        return _Block(lanes, rows, width, transposed=True)
    raise NotUnderstood(f"weight {weight.leaf} {list(weight.stored)} takes the features in another order than the activation has them")


def _outputs(block: _Block, dim: Dim) -> Dim:
    """A dimension of the weight that is new in the result, over the result's features."""
    unit = 1 if block.transposed else block.width
    if any(atom.stride % unit for atom in dim):
        raise NotUnderstood("a weight's rows and columns are mixed")
    return tuple(Atom(atom.stride // unit, atom.size) for atom in dim)


def _kept(space: Space, to: Space, dim: Dim) -> Dim:
    """A dimension of x that stays, over the result: tokens and broadcasts only."""
    if any(axis != "T" for atom in dim if atom.stride for axis, _ in space.by_axis(atom)):
        raise NotUnderstood("features stay in the result of a product (a linear layer per head, or one shared by lanes, is not supported)")
    return space.moved(Layout((dim,)), to).dims[0]


def _leaf(context: Context, weight: Weight, block: _Block) -> str:
    shape = (block.rows, block.width) if block.lanes is None else (block.lanes, block.rows, block.width)
    attrs = {"transpose": True} if block.transposed else {}
    return context.leaf("weight", weight.leaf, TensorType(shape, context.graph_dtype(weight.leaf)), **attrs)


# ── rules ──


@rule("linear")
def linear_rule(context: Context, node: Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    rank = len(context.graph[node.inputs[0]].type.shape)
    tokens = "abcdefgh"[: rank - 1]
    return _biased(context, node, product(context, node, x, weight, (tokens + "x", "yx", tokens + "y")), bias)


def _biased(context: Context, node: Node, y: Value, bias: Value | None) -> Value:
    if bias is None:
        return y
    return with_vector(context, node, "lift.vec_add", y, bias) if isinstance(bias, Weight) else add(context, node, y, bias)


@rule("matmul", "mm", "bmm")
def matmul(context: Context, node: Node, a: Value, b: Value, ranks: tuple[int, int] | None = None) -> Value:
    ranks = ranks or tuple(len(context.graph[name].type.shape) for name in node.inputs)
    return product(context, node, a, b, _matmul_labels(*ranks))


def _matmul_labels(first: int, second: int) -> tuple[str, str, str]:
    batch = "abcdefgh"[: max(first, second, 2) - 2]
    rows, columns = ("x" if first > 1 else ""), ("y" if second > 1 else "")
    a = batch[len(batch) - max(first - 2, 0) :] + rows + "k"
    b = batch[len(batch) - max(second - 2, 0) :] + "k" + columns
    return a, b, batch + rows + columns


@rule("addmm", "baddbmm")
def addmm(context: Context, node: Node, bias: Value, a: Value, b: Value, beta: float = 1, alpha: float = 1) -> Value:
    if (beta, alpha) != (1, 1):
        raise NotUnderstood("addmm with factors")
    ranks = tuple(len(context.graph[name].type.shape) for name in node.inputs[1:])
    return _biased(context, node, matmul(context, node, a, b, ranks), bias)


@rule("einsum")
def einsum(context: Context, node: Node, equation: str, operands: Sequence[Value], *_: object) -> Value:
    if len(operands) != 2:
        raise NotUnderstood(f"an einsum of {len(operands)} operands")
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in equation:
        terms, out = _without_ellipsis(context, node, terms, out)
    if not arrow:
        letters = "".join(terms)
        out = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return product(context, node, operands[0], operands[1], (terms[0], terms[1], out))


def _without_ellipsis(context: Context, node: Node, terms: list[str], out: str) -> tuple[list[str], str]:
    ranks = [len(context.graph[name].type.shape) for name in node.inputs]
    free = [letter for letter in "ABCDEFGH" if letter not in "".join(terms)]
    hidden = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    letters = "".join(free[: max(hidden)])
    spelled = [term.replace("...", letters[len(letters) - count :]) for term, count in zip(terms, hidden, strict=True)]
    return spelled, out.replace("...", letters)
