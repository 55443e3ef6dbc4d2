"""The pass: lift the tensor graph, rewrite what is left, check it and name it."""

from __future__ import annotations

from collections.abc import Callable

from kogc.ir.graph import Graph, Node
from kogc.ir.ops import has_op, op_row
from kogc.ir.passes.recognize.errors import UnrecognizedOp
from kogc.ir.passes.recognize.lift import lift
from kogc.ir.passes.recognize.match import rewritten
from kogc.ir.passes.recognize.naming import names_for
from kogc.ir.passes.recognize.tables import TABLES

_LEFT_OVER = {
    "lift.vec_mul": "features are multiplied by a weight vector outside of a norm",
    "lift.vec_add": "a weight vector is added outside of a linear layer or norm",
    "lift.mean": "a mean over features outside of a norm",
    "lift.sum": "a sum over features outside of a norm",
    "lift.var": "a variance outside of a norm",
    "lift.add_scalar": "a number is added to an activation",
    "lift.pow": "an activation is raised to a power and that is no known activation function",
    "lift.fn": "a function outside of norms and known activation functions",
}


def recognize(graph: Graph) -> Graph:
    """The decode graph of one decoder step.

    Args:
        graph: level ``tensor``, as ``kogc.frontend.trace`` makes it: leaves token and position int64 [T], weights, tables and
            KV caches; ATen ops; logits [T, vocab] out. T (the traced number of tokens) must be at least 2.

    Returns:
        A graph of level ``decode`` for any number of tokens: values [T, features] or [T, lanes, features], caches
        [kv_heads, capacity, head_dim], rope tables [capacity, rotary_dim / 2]. Activations are fp32 (fp64 when weights are),
        weights keep their dtype. A weight leaf may differ from the stored tensor in shape, be stored
        transposed (``transpose``) or be a part of a stored vector (``rows``): see ``kogc.ir.interpret.weight_part``.
        ``meta`` gains ``vocab``, ``hidden``, ``capacity`` and ``caches`` (canonical type by key).

    Raises:
        UnrecognizedOp: a part of the model is no decode op. Names the op, the reason, the module and the source line.
        GraphError: the graph is no decode step (no cache, caches of different lengths, T below 2).
    """
    _check_tokens(graph)
    lifted = lift(graph)
    result = lifted.graph
    for table in TABLES:
        result = rewritten(result, table)
    for node in result:
        _check(result, node)
    return _finished(graph, result, lifted.context.capacity)


def _check_tokens(graph: Graph) -> None:
    if graph["token"].type.shape[0] < 2:
        raise UnrecognizedOp(graph["token"], "a step must be traced with at least 2 tokens, so that the token axis can be told from others")


def _check(graph: Graph, node: Node) -> None:
    """Raises UnrecognizedOp for helpers that are left and results that the op's shape rule does not allow."""
    if not has_op(node.op):
        raise UnrecognizedOp(node, _LEFT_OVER.get(node.op, "it has no decode op"))
    row = op_row(node.op)
    if row.role == "leaf":
        return
    try:
        found = row.shape(tuple(operand.type for operand in graph.operands(node)), node.attrs)
    except ValueError as error:
        raise UnrecognizedOp(node, str(error)) from error
    if found.shape != node.type.shape:
        raise UnrecognizedOp(node, f"its operands make {found}, the model makes {node.type}")


def _finished(source: Graph, lifted: Graph, capacity: int) -> Graph:
    """The lifted graph, named and with its facts."""
    names: Callable[[str], str] = names_for(lifted).__getitem__
    graph = source.like("decode")
    graph.tables = {}
    for node in lifted:
        attrs = dict(node.attrs)
        if node.op == "attention":
            attrs = {"window": None, "softcap": None, **attrs}
        graph.add(node.with_(name=names(node.name), inputs=tuple(map(names, node.inputs)), attrs=attrs))
        if node.op == "table":
            graph.tables[attrs["key"]] = lifted.tables[attrs["key"]]
    graph.outputs = tuple(map(names, lifted.outputs))
    graph.effects = tuple(map(names, lifted.effects))
    (logits, *_) = graph.outputs
    embeds = [node for node in graph if node.op == "embed"]
    graph.meta |= {
        "vocab": graph[logits].type.shape[-1],
        "hidden": embeds[0].type.shape[-1] if embeds else None,
        "capacity": capacity,
        "caches": {node.attrs["key"]: node.type for node in graph if node.op == "cache"},
    }
    return graph
