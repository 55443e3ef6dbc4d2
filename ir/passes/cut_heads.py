"""What a linear's rows are for: heads of attention, words, or features of a block."""

from __future__ import annotations

from dataclasses import dataclass

from kogc.ir.graph import Graph, Node
from kogc.ir.ops import op_row


@dataclass(frozen=True)
class Heads:
    """The rows are ``heads`` heads; ``stored``: keys or values, of which several query heads may need one."""

    heads: int
    stored: bool


def heads_made_by(graph: Graph, name: str) -> Heads | None:
    """The heads that the rows of ``name`` become, by way of row-wise ops; None when they become none."""
    for user in graph.users(name):
        if user.op == "kv_append":
            return Heads(graph[user.inputs[0]].type.shape[0], True)
        if user.op == "attention" and user.inputs[0] == name:
            return Heads(user.attrs["heads"], False)
        if _is_rowwise(user) and (found := heads_made_by(graph, user.name)):
            return found
    return None


def reaches_output(graph: Graph, name: str) -> bool:
    """Whether ``name`` is a result of the step, or becomes one by row-wise ops on it alone."""
    if name in graph.outputs:
        return True
    return any(_is_rowwise(user) and len(user.inputs) == 1 and reaches_output(graph, user.name) for user in graph.users(name))


def _is_rowwise(node: Node) -> bool:
    return op_row(node.op).role == "rowwise"
