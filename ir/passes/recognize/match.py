"""Patterns over a graph and tables of rewrites: pattern → replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kogc.ir.graph import Graph, Node
from kogc.ir.passes.recognize.lifted import Builder
from kogc.ir.types import TensorType

COMMUTATIVE = frozenset(("add", "mul"))


@dataclass(frozen=True)
class Bind:
    """Stands for an attribute's value (None when absent), remembered under ``name``."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """An op, patterns or variable names for its operands, and attribute values that must hold.

    A variable is bound to the operand's name; the same variable must be the same node everywhere. Operands of commutative
    ops match in both orders.
    """

    op: str
    operands: tuple[Pattern | str, ...]
    attrs: Mapping[str, Any]


def p(op: str, *operands: Pattern | str, **attrs: Any) -> Pattern:
    """A pattern: ``p("mul", "x", p("activation", "x", fn="sigmoid"))``."""
    return Pattern(op, operands, attrs)


Found = dict[str, Any]


def match(graph: Graph, name: str, pattern: Pattern | str, found: Found) -> Iterator[Found]:
    """All ways in which node ``name`` is ``pattern``, as bindings that extend ``found``."""
    if isinstance(pattern, str):
        if found.get(pattern, name) == name:
            yield {**found, pattern: name}
        return
    node = graph[name]
    if node.op != pattern.op or len(node.inputs) != len(pattern.operands):
        return
    bound = _attributes(node, pattern, found)
    if bound is None:
        return
    yield from _operands(graph, node.inputs, pattern.operands, bound)
    if node.op in COMMUTATIVE:
        yield from _operands(graph, node.inputs[::-1], pattern.operands, bound)


def _attributes(node: Node, pattern: Pattern, found: Found) -> Found | None:
    found = dict(found)
    for name, wanted in pattern.attrs.items():
        value = node.attrs.get(name)
        if isinstance(wanted, Bind):
            if found.setdefault(wanted.name, value) != value:
                return None
        elif value != wanted:
            return None
    return found


def _operands(graph: Graph, names: Sequence[str], patterns: Sequence[Pattern | str], found: Found) -> Iterator[Found]:
    if not names:
        yield found
        return
    for bound in match(graph, names[0], patterns[0], found):
        yield from _operands(graph, names[1:], patterns[1:], bound)


@dataclass(frozen=True)
class Rewrite:
    """``make(builder, node, bindings)`` names what replaces the matched ``node``, or is None when it is no match after all."""

    name: str
    pattern: Pattern
    make: Callable[[Builder, Node, Found], str | None]


class Rewriter(Builder):
    """A builder that rewrites every node it makes until no rewrite of ``table`` matches, those that rewrites make too."""

    def __init__(self, like: Graph, table: Sequence[Rewrite]) -> None:
        super().__init__(like)
        self.graph.tables = dict(like.tables)
        self._by_op: dict[str, list[Rewrite]] = {}
        for rewrite in table:
            self._by_op.setdefault(rewrite.pattern.op, []).append(rewrite)
        self._settled: dict[str, str] = {}

    def emit(self, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any], kind: TensorType, origin: Node | None = None) -> str:
        name = super().emit(op, inputs, attrs, kind, origin)
        if name not in self._settled:
            self._settled[name] = self._rewritten(name) or name
        return self._settled[name]

    def _rewritten(self, name: str) -> str | None:
        for rewrite in self._by_op.get(self[name].op, ()):
            for found in match(self.graph, name, rewrite.pattern, {}):
                made = rewrite.make(self, self[name], found)
                if made is not None and made != name:
                    return made
        return None


def rewritten(graph: Graph, table: Sequence[Rewrite]) -> Graph:
    """``graph`` with every rewrite of ``table`` applied, operands before their users."""
    builder = Rewriter(graph, table)
    new: dict[str, str] = {}
    for node in graph:
        new[node.name] = builder.emit(node.op, tuple(new[operand] for operand in node.inputs), node.attrs, node.type, node)
    builder.graph.outputs = tuple(new[name] for name in graph.outputs)
    builder.graph.effects = tuple(new[name] for name in graph.effects)
    return builder.graph.without_dead_nodes()
