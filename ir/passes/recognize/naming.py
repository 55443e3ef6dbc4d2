"""Readable, unique names for the nodes of a decode graph."""

from __future__ import annotations

from kogc.ir.graph import LEAF_OPS, Graph, Node


def names_for(graph: Graph) -> dict[str, str]:
    """New name by old name: leaves by key, linear ops by their weight, others by module and op."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    leaves_first = sorted(graph, key=lambda node: node.op not in LEAF_OPS)
    for node in leaves_first:
        names[node.name] = _fresh(_wanted(graph, node), node.op, taken)
        taken.add(names[node.name])
    return names


def _wanted(graph: Graph, node: Node) -> str:
    if node.op in ("token", "position"):
        return node.op
    if node.op in LEAF_OPS:
        return node.attrs["key"] + _part(node)
    if node.op in ("linear", "embed"):
        return graph[node.inputs[1]].attrs["key"].removesuffix(".weight") + _part(node)
    return f"{node.module}.{node.op}" if node.module else node.op


def _part(node: Node) -> str:
    rows = node.attrs.get("rows")
    return f".{rows[0]}_{rows[1]}" if rows else ""


def _fresh(name: str, op: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    if op in ("linear", "embed"):
        name = f"{name}.{op}"
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
