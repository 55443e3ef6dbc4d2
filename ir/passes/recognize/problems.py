"""All that recognition does not understand of a graph, where ``recognize`` stops at the first."""

from __future__ import annotations

from kogc.ir.graph import Graph
from kogc.ir.passes.recognize.errors import UnrecognizedOp
from kogc.ir.passes.recognize.lift import lift


def find_problems(graph: Graph) -> list[UnrecognizedOp]:
    """An error for every node of ``graph`` (level ``tensor``) that has no meaning although all its operands have one.

    Nodes that read such a node are passed over: nothing can be said about them. Empty where lifting gets through; the
    graph may still hold ops without a place, which ``recognize`` names.

    Raises GraphError where the graph is no decode step.
    """
    problems: list[UnrecognizedOp] = []
    lift(graph, problems)
    return problems
