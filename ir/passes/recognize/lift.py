"""Reading a tensor graph once, node by node, as symbolic values: layouts vanish, decode ops and helper ops remain."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.ir.graph import Graph, GraphError, Node
from kogc.ir.passes.recognize import rules  # noqa: F401  (fills RULES)
from kogc.ir.passes.recognize.cache import cache_leaf, slot_axis
from kogc.ir.passes.recognize.context import RULES, Context, arguments, describe
from kogc.ir.passes.recognize.errors import NotUnderstood, UnrecognizedOp
from kogc.ir.passes.recognize.layout import Layout, LayoutError
from kogc.ir.passes.recognize.values import Act, Cache, Static, Token, Unknown, Value, Weight


@dataclass(frozen=True)
class Lifted:
    """The lifted graph and what it was read from."""

    graph: Graph
    context: Context


def lift(graph: Graph, problems: list[UnrecognizedOp] | None = None) -> Lifted:
    """The graph of decode ops and helpers that ``graph`` (level ``tensor``) computes.

    Raises UnrecognizedOp for the first node that has no meaning as a decoder step; with ``problems`` it goes on behind such
    nodes, collects their errors there, and the result has neither outputs nor effects where there are any.
    """
    context = Context(graph, activation_dtype(graph), _capacity(graph))
    for node in graph:
        try:
            context.values[node.name] = _understood(context, node)
        except UnrecognizedOp as error:
            if problems is None:
                raise
            problems.append(error)
            context.values[node.name] = Unknown()
    result = context.builder.graph
    if problems:
        return Lifted(result, context)
    result.outputs = tuple(_logits(context, graph[name]) for name in graph.outputs)
    result.effects = tuple(_effect(context, graph[name]) for name in graph.effects)
    return Lifted(result, context)


def activation_dtype(graph: Graph) -> str:
    """Activations are fp32, or fp64 in a model with fp64 weights."""
    return "fp64" if any(node.op == "weight" and node.type.dtype == "fp64" for node in graph) else "fp32"


def _capacity(graph: Graph) -> int:
    """Positions the caches hold, read from how they are written."""
    leaves = [node for node in graph if node.op == "cache"]
    sizes = {leaf.type.shape[slot_axis(graph, leaf)] for leaf in leaves if leaf.type.shape}
    if len(sizes) > 1:
        raise GraphError(f"the KV caches of {graph.name} hold different numbers of positions: {sorted(sizes)}")
    if not sizes:
        raise GraphError(f"{graph.name} has no KV cache")
    return sizes.pop()


def _understood(context: Context, node: Node) -> Value:
    try:
        return _value(context, node)
    except (NotUnderstood, LayoutError) as error:
        raise UnrecognizedOp(node, str(error)) from error
    except TypeError as error:
        # A rule was called with arguments that it does not take: an overload nobody has described yet.
        raise UnrecognizedOp(node, f"called in an unknown way: {error}") from error


def _value(context: Context, node: Node) -> Value:
    if node.op == "token":
        return Token()
    if node.op == "weight":
        return Weight(node.attrs["key"], node.type.shape, Layout.contiguous(node.type.shape))
    if node.op == "cache":
        return cache_leaf(context, node, node.type.dtype)
    operands = tuple(context.values[name] for name in node.inputs)
    if all(isinstance(value, Static) for value in operands):
        return Static(node.name)  # position and tables, too: they have no operands
    if any(isinstance(value, Unknown) for value in operands):
        return _past(node, operands)
    rule = RULES.get(node.op)
    if rule is None:
        kinds = ", ".join(describe(value) for value in operands)
        raise NotUnderstood(f"no rule for this op on {kinds}")
    args, kwargs = arguments(node, operands)
    return rule(context, node, *args, **kwargs)


def _past(node: Node, operands: tuple[Value, ...]) -> Value:
    """What is known where an operand is not: a residual stream goes on, so that later layers are looked at, too."""
    known = [value for value in operands if isinstance(value, Act) and value.layout.shape == node.type.shape]
    return known[0] if node.op == "aten.add" and len(known) == 1 else Unknown()


def _logits(context: Context, node: Node) -> str:
    try:
        act = context.whole(context.values[node.name])
        if act.layout != Layout.contiguous((act.space.tokens, act.space.row)):
            raise NotUnderstood("the logits are not [tokens, vocabulary]")
    except NotUnderstood as error:
        raise UnrecognizedOp(node, str(error)) from error
    if act.space.lanes is None:
        return act.node
    return context.builder.emit("lane_concat", (act.node,), {}, context.builder.value_type(None, act.space.row), node)


def _effect(context: Context, node: Node) -> str:
    value = context.values[node.name]
    if not isinstance(value, Cache) or value.factor != 1:
        raise UnrecognizedOp(node, f"a cache becomes {describe(value)}" + (" multiplied by a number" if isinstance(value, Cache) else ""))
    return value.node
