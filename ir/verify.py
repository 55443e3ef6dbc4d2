"""The verifier: what a legal graph is. Every pass is followed by it."""

from __future__ import annotations

from kogc.ir.graph import LEAF_OPS, Graph, GraphError, Node, where
from kogc.ir.interpret import cache_key
from kogc.ir.ops import has_op, op_row

LEVELS = ("tensor", "decode")


def verify(graph: Graph) -> Graph:
    """Return ``graph`` if it is legal.

    Legal means: every op is known and belongs to the graph's level; operand counts fit; the op's shape rule accepts the
    operands and gives the recorded shape; leaves carry their attributes and tables their values; each step input exists
    once; outputs and effects exist, the logits are float [T, vocab] and every effect is a new version of a cache.

    Raises:
        GraphError: the first thing that is wrong, with node, op, types, producers and the user's source line.
    """
    if graph.level not in LEVELS:
        raise GraphError(f"graph {graph.name} has level {graph.level!r}, expected one of {', '.join(LEVELS)}")
    for node in graph:
        _check_op(graph, node)
        _check_leaf(graph, node) if node.op in LEAF_OPS else _check_type(graph, node)
    _check_inputs(graph)
    _check_results(graph)
    return graph


def describe(graph: Graph, node: Node) -> str:
    """``name = op(producer: type, …) -> type (at source)``: how errors name a node."""
    operands = ", ".join(f"{operand.name} ({operand.op}): {operand.type}" for operand in graph.operands(node))
    return f"{node.name} = {node.op}({operands}) -> {node.type}{where(node)}"


def _fail(graph: Graph, node: Node, problem: str) -> None:
    raise GraphError(f"{problem} in {describe(graph, node)}")


def _check_op(graph: Graph, node: Node) -> None:
    if not has_op(node.op):
        _fail(graph, node, f"unknown op {node.op}")
    row = op_row(node.op)
    if row.role != "leaf" and (row.role == "tensor") != (graph.level == "tensor"):
        _fail(graph, node, f"op {node.op} does not belong into a {graph.level} graph")
    if row.role == "tensor":
        return  # as many operands as the recorded call has
    most = len(row.operands)
    if not most - row.optional <= len(node.inputs) <= most:
        wanted = f"{most - row.optional} to {most}" if row.optional else str(most)
        _fail(graph, node, f"{len(node.inputs)} operands, expected {wanted} ({' '.join(row.operands) or 'none'}),")


def _check_leaf(graph: Graph, node: Node) -> None:
    for name in op_row(node.op).attrs:
        if not isinstance(node.attrs.get(name), str):
            _fail(graph, node, f"attribute {name} is missing")
    if node.op != "table":
        return
    key = node.attrs["key"]
    if key not in graph.tables:
        _fail(graph, node, f"the graph has no table {key!r}")
    values = graph.tables[key]
    if values.shape != node.type.shape or values.dtype != node.type.numpy_dtype:
        _fail(graph, node, f"table {key!r} holds {values.dtype}{list(values.shape)}")


def _check_type(graph: Graph, node: Node) -> None:
    row = op_row(node.op)
    unknown = sorted(set(node.attrs) - set(row.attrs))
    missing = sorted(n for n, kind in row.attrs.items() if n not in node.attrs and "None" not in kind)
    if unknown or missing:
        _fail(graph, node, f"attributes {unknown} are unknown and {missing} are missing")
    types = tuple(operand.type for operand in graph.operands(node))
    try:
        found = row.shape(types, node.attrs)
    except (ValueError, LookupError, TypeError) as error:
        raise GraphError(f"{error} in {describe(graph, node)}") from error
    # The rule does not decide in which float width a result is kept: norms and sums are kept wider than weights.
    if found is not None and (found.shape != node.type.shape or found.is_float != node.type.is_float):
        _fail(graph, node, f"the operands make {found}, recorded is another type,")


def _check_inputs(graph: Graph) -> None:
    for name in ("token", "position"):
        nodes = [node for node in graph if node.op == name]
        if len(nodes) != 1:
            raise GraphError(f"graph {graph.name} has {len(nodes)} leaves {name}, expected one")
        (node,) = nodes
        if len(node.type.shape) != 1 or node.type.dtype != "int64":
            _fail(graph, node, f"{name} must be int64[T]")
        if graph.level == "decode" and node.type.shape != ("T",):
            _fail(graph, node, f"{name} must have the symbolic shape [T]")


def _check_results(graph: Graph) -> None:
    if not graph.outputs:
        raise GraphError(f"graph {graph.name} has no outputs")
    for name in (*graph.outputs, *graph.effects):
        if name not in graph:
            raise GraphError(f"graph {graph.name} promises {name}, which is not in the graph")
    for effect in graph.effects:
        node = graph[effect]
        if graph.level == "decode" and op_row(node.op).role != "state":
            _fail(graph, node, "an effect must write a cache")
        key = cache_key(graph, effect)
        leaf = next(n for n in graph if n.op == "cache" and n.attrs["key"] == key)
        if leaf.type.shape != node.type.shape:
            _fail(graph, node, f"effect has another shape than its cache {key}, {leaf.type},")
