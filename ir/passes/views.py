"""Weights as the stages read them: every leaf becomes a tensor of its own, in its own shape.

A leaf of the recognised graph may show a stored weight in another shape, transposed, or a part of it. Behind this pass no
leaf does: it names a value of its own, and ``ViewedWeights`` makes that value from the model's weights when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kogc.ir.graph import Graph, Node
from kogc.ir.interpret import leaf_value
from kogc.ir.shards import CUT_MARK, uncut
from kogc.ir.weights import WeightSource


@dataclass(frozen=True)
class Viewed:
    """A graph of plain weight leaves, and by key the leaf each of them was. A leaf whose key is not the stored tensor's
    has that one as attr ``source``."""

    graph: Graph
    leaves: Mapping[str, Node]


class ViewedWeights:
    """The weights of a ``Viewed`` graph, made from those of the graph it was made from."""

    def __init__(self, weights: WeightSource, leaves: Mapping[str, Node]) -> None:
        self._weights, self._leaves = weights, leaves

    def keys(self) -> Iterable[str]:
        return self._leaves.keys()

    def get(self, key: str) -> np.ndarray:
        """Raises KeyError for an unknown key, GraphError when a stored tensor has not the size of the leaf."""
        return leaf_value(self._leaves[key], self._weights)


def separate_views(graph: Graph) -> Viewed:
    """Give every weight leaf that is not simply the stored tensor a key of its own."""
    nodes, leaves = [], {}
    for node in graph:
        if node.op == "weight":
            key = _own_key(node, leaves)
            leaves[key] = node
            stored = node.attrs["key"]
            node = node.with_(attrs={"key": key} if key == stored else {"key": key, "source": stored})
        nodes.append(node)
    return Viewed(graph.rebuilt(nodes, graph.outputs, graph.effects), leaves)


def source_key(leaf: Node) -> str:
    """Key of the stored tensor behind a weight leaf."""
    return leaf.attrs.get("source", leaf.attrs["key"])


def _own_key(leaf: Node, taken: Mapping[str, Node]) -> str:
    """The stored key, with what is done to it; the same view has the same key."""
    if "cut" in leaf.attrs:
        (first, last), whole = leaf.attrs["part"], leaf.attrs["whole"]
        part = f" {first} to {last - 1}" if (first, last) != (0, whole[0]) else ""
        return f"{_own_key(uncut(leaf), taken)}{CUT_MARK}{leaf.attrs['cut']}{part}"
    rows, key = leaf.attrs.get("rows"), leaf.attrs["key"]
    if rows:
        key += f"[{rows[0]}:{rows[1]}]"
    if leaf.attrs.get("joined"):
        key += f"[and {len(leaf.attrs['joined']) - 1} more]"
    if leaf.attrs.get("transpose"):
        key += ".T"
    if leaf.attrs.get("groups"):
        _, first, size, step, count = leaf.attrs["groups"]
        key += f"[{first}:{first + size} of {count} times {step}]"
    if key in taken and taken[key].type.shape != leaf.type.shape:
        key += f" as {'x'.join(map(str, leaf.type.shape))}"
    return key
