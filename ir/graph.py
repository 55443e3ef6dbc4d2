"""One graph class for every level of the IR: named nodes in a ``networkx.DiGraph``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import networkx as nx
import numpy as np

from kogc.ir.types import TensorType


class GraphError(ValueError):
    """An illegal graph. The message names the node, its op and types, its producers and the user's source line."""


@dataclass(frozen=True)
class Ref:
    """Stands for operand number ``index`` inside the recorded arguments of a tensor-level op."""

    index: int


@dataclass(frozen=True)
class Node:
    """One operation and its single result.

    ``inputs`` are names of other nodes in operand order. ``attrs`` holds JSON-able values and, on tensor level, ``Ref``.
    ``source`` is ``file:line: code`` of the user's model; ``module`` the dotted path of the module that made the node.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    type: TensorType
    attrs: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    def with_(self, **changes: Any) -> Node:
        return replace(self, **changes)


#: Ops without operands whose value comes from outside the step.
LEAF_OPS = ("token", "position", "weight", "table", "cache")


class Graph:
    """A decode step as a directed acyclic graph, in insertion (= execution) order.

    Leaves: ``token`` and ``position`` (int64[T]), ``weight`` (attrs: ``key`` into the weight source),
    ``table`` (attrs: ``key`` into ``tables``), ``cache`` (attrs: ``key``; state that lives across steps).
    ``level`` is ``tensor`` or ``decode``. ``outputs`` names the result nodes (logits first).
    ``effects`` names nodes that must run although nobody reads them (cache writes).
    """

    def __init__(self, level: str, name: str = "model") -> None:
        self.level = level
        self.name = name
        self.nx = nx.DiGraph()
        self.outputs: tuple[str, ...] = ()
        self.effects: tuple[str, ...] = ()
        #: Numeric tables derived from the position alone (rope cos/sin), first axis = position.
        self.tables: dict[str, np.ndarray] = {}
        #: Facts about the model that passes and reports need: capacity, traced step tokens, vocab …
        self.meta: dict[str, Any] = {}

    def add(self, node: Node) -> Node:
        """Append ``node``. Raises GraphError for a repeated name or an operand that does not exist yet."""
        if node.name in self.nx:
            raise GraphError(f"node {node.name} exists twice")
        for operand in node.inputs:
            if operand not in self.nx:
                raise GraphError(f"{node.name} ({node.op}) reads {operand}, which is not in the graph{where(node)}")
        self.nx.add_node(node.name, node=node)
        for index, operand in enumerate(node.inputs):
            if self.nx.has_edge(operand, node.name):
                self.nx.edges[operand, node.name]["operands"] += (index,)
            else:
                self.nx.add_edge(operand, node.name, operands=(index,))
        return node

    def __getitem__(self, name: str) -> Node:
        return self.nx.nodes[name]["node"]

    def __contains__(self, name: str) -> bool:
        return name in self.nx

    def __iter__(self) -> Iterator[Node]:
        """All nodes, operands before users."""
        return (self.nx.nodes[name]["node"] for name in self.nx)

    def __len__(self) -> int:
        return len(self.nx)

    def users(self, name: str) -> list[Node]:
        """Nodes that read ``name``, in execution order of insertion."""
        return [self[user] for user in self.nx.successors(name)]

    def operands(self, node: Node) -> list[Node]:
        return [self[name] for name in node.inputs]

    def like(self, level: str | None = None) -> Graph:
        """An empty graph that shares this one's name, tables and facts."""
        other = Graph(level or self.level, self.name)
        other.tables = dict(self.tables)
        other.meta = dict(self.meta)
        return other

    def rebuilt(self, nodes: Iterable[Node], outputs: tuple[str, ...], effects: tuple[str, ...]) -> Graph:
        """A graph with the given nodes, which need not be ordered: operands are moved before their users."""
        by_name = {node.name: node for node in nodes}
        order = nx.DiGraph()
        order.add_nodes_from(by_name)
        order.add_edges_from((operand, node.name) for node in by_name.values() for operand in node.inputs)
        rank = {name: index for index, name in enumerate(by_name)}
        graph = self.like()
        for name in nx.lexicographical_topological_sort(order, key=rank.__getitem__):
            if name not in by_name:
                raise GraphError(f"a node reads {name}, which is not in the graph")
            graph.add(by_name[name])
        graph.outputs, graph.effects = outputs, effects
        return graph

    def without_dead_nodes(self) -> Graph:
        """A graph of what outputs and effects need; leaves ``token`` and ``position`` always stay."""
        needed: set[str] = set()
        waiting = [*self.outputs, *self.effects]
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting.extend(self[name].inputs)
        needed |= {node.name for node in self if node.op in ("token", "position")}
        return self.rebuilt((n for n in self if n.name in needed), self.outputs, self.effects)


def where(node: Node) -> str:
    """`` (at file:line: code)`` of the user's model, or nothing when unknown."""
    return f" (at {node.source})" if node.source else ""
