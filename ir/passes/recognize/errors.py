"""What recognition says when it does not understand a graph."""

from __future__ import annotations

from kogc.ir.graph import GraphError, Node, where


class UnrecognizedOp(GraphError):
    """A part of the model that has no meaning as decode ops. Names the op, why, the module and the user's source line."""

    def __init__(self, node: Node, why: str) -> None:
        module = f" in module {node.module}" if node.module else ""
        super().__init__(f"cannot recognise {node.op} ({node.name}){module}: {why}{where(node)}")
        self.node = node
        self.why = why


class NotUnderstood(Exception):
    """Raised inside of a rule, which does not know its node; the walk turns it into UnrecognizedOp."""
