"""The decode graph rewritten to stage level: attention in two halves, and the choice of the next token at the end."""

from __future__ import annotations

from kogc.ir.graph import Graph, Node
from kogc.ir.ops import op_row
from kogc.ir.passes.fuse_names import Unique

SPLIT_OPS = ("attention_partial", "attention_combine")


def to_stage_level(graph: Graph, splits: int = 1) -> Graph:
    """Cut every ``attention`` into ``attention_partial`` and ``attention_combine`` and append ``sample``.

    The combine keeps the attention's name. Outputs are the logits, then the next token.
    """
    unique = Unique(node.name for node in graph)
    result = graph.like()
    for node in graph:
        if node.op == "attention":
            partial = result.add(_partial(result, node, unique(f"{node.name}_partial"), splits))
            attrs = {"head_dim": node.attrs["head_dim"], "splits": splits}
            node = node.with_(op="attention_combine", inputs=(partial.name,), attrs=attrs)
        result.add(node)
    logits = result[graph.outputs[0]]
    token_type = op_row("sample").shape((logits.type,), {})
    token = result.add(Node(unique("next_token"), "sample", (logits.name,), token_type, source=logits.source))
    result.outputs, result.effects = (*graph.outputs, token.name), graph.effects
    return result


def with_splits(graph: Graph, splits: int) -> Graph:
    """A stage-level graph with every attention cut into ``splits`` parts of the context."""
    if splits < 1:
        raise ValueError(f"splits is {splits}, expected at least 1")
    result = graph.like()
    for node in graph:
        if node.op in SPLIT_OPS:
            node = node.with_(attrs={**node.attrs, "splits": splits})
        if node.op == "attention_partial":
            node = node.with_(type=op_row(node.op).shape(_types(result, node), node.attrs))
        result.add(node)
    result.outputs, result.effects = graph.outputs, graph.effects
    return result


def _partial(graph: Graph, attention: Node, name: str, splits: int) -> Node:
    attrs = {**attention.attrs, "splits": splits}
    kind = op_row("attention_partial").shape(_types(graph, attention), attrs)
    return attention.with_(name=name, op="attention_partial", attrs=attrs, type=kind)


def _types(graph: Graph, node: Node) -> tuple:
    return tuple(operand.type for operand in graph.operands(node))
