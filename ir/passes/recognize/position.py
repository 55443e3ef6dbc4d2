"""Position functions: sub-graphs of position, tables and constants, kept as they are and evaluated when a number is needed.

Masks and rotary tables are therefore understood by their values, in whatever way a model computes them.
"""

from __future__ import annotations

import numpy as np

from kogc.ir.graph import Graph, Node
from kogc.ir.passes.recognize.evaluate import frozen, needed, run


class PositionFunctions:
    """Evaluates static nodes of ``graph``; equal sub-graphs are evaluated once."""

    def __init__(self, graph: Graph, tokens: int, capacity: int) -> None:
        self.graph = graph
        self.tokens = tokens
        self.capacity = capacity
        self._plans: dict[str, list[Node]] = {}
        self._keys: dict[str, int] = {}
        self._interned: dict[object, int] = {}
        self._tables: dict[int, np.ndarray] = {}
        self._moving: dict[str, bool] = {}

    def key(self, name: str) -> int:
        """Equal for nodes that compute the same in the same way."""
        if name not in self._keys:
            node = self.graph[name]
            parts = tuple(self.key(operand) for operand in node.inputs)
            self._keys[name] = self._interned.setdefault((node.op, frozen(node.attrs), parts), len(self._interned))
        return self._keys[name]

    def depends_on_position(self, name: str) -> bool:
        if name not in self._moving:
            node = self.graph[name]
            self._moving[name] = node.op == "position" or any(map(self.depends_on_position, node.inputs))
        return self._moving[name]

    def at(self, name: str, positions: np.ndarray) -> np.ndarray:
        """The value of ``name`` for the step's positions, int64 [T]."""
        if name not in self._plans:
            self._plans[name] = needed(self.graph, [name], lambda n: self.graph[n].op in ("position", "table"))
        values = _Leaves(self.graph, positions)
        node = self.graph[name]
        if node.op in ("position", "table"):
            return values[name]
        return run(self._plans[name], values, rounded=True)[name]

    def constant(self, name: str) -> np.ndarray:
        """The value of a node that does not depend on the position."""
        return self.at(name, np.arange(self.tokens))

    def is_position(self, name: str) -> bool:
        """Whether the elements of ``name`` are just the positions, in order."""
        if not self.depends_on_position(name) or np.prod(self.graph[name].type.shape) != self.tokens:
            return False
        probes = (np.arange(self.tokens), self.capacity - 1 - np.arange(self.tokens)[::-1] * 2 % self.capacity)
        return all(np.array_equal(self.at(name, p).reshape(-1), p) for p in probes)

    def token_axis(self, name: str) -> int | None:
        """The axis whose slice i depends on position i alone; None when there is none."""
        middle = np.full(self.tokens, self.capacity // 2)
        before = self.at(name, middle)
        changed = []
        for last in (self.capacity - 1, 0):
            positions = middle.copy()
            positions[-1] = last
            changed.append(before != self.at(name, positions))
        for axis, size in enumerate(before.shape):
            if size == self.tokens:
                by_token = [np.moveaxis(change, axis, 0) for change in changed]
                if any(change[-1].any() for change in by_token) and not any(change[:-1].any() for change in by_token):
                    return axis
        return None

    def tabulate(self, name: str) -> np.ndarray | None:
        """The values for all positions, [capacity, …]: the token axis first, then the other axes. None without token axis."""
        key = self.key(name)
        if key not in self._tables:
            axis = self.token_axis(name)
            if axis is None:
                return None
            whole = self._in_one_go(name, axis)
            self._tables[key] = self._by_steps(name, axis) if whole is None else whole
        return self._tables[key]

    def _in_one_go(self, name: str, axis: int) -> np.ndarray | None:
        """All positions as one long step. None when the graph insists on its traced number of tokens."""
        expected = list(self.graph[name].type.shape)
        expected[axis] = self.capacity
        try:
            whole = self.at(name, np.arange(self.capacity))
        except (ValueError, IndexError, TypeError):
            return None
        if list(whole.shape) != expected:
            return None
        whole = np.moveaxis(whole, axis, 0)
        for start in (0, self.capacity // 2, self.capacity - self.tokens):
            rows = np.clip(start + np.arange(self.tokens), 0, self.capacity - 1)
            if not np.array_equal(np.moveaxis(self.at(name, rows), axis, 0), whole[rows], equal_nan=True):
                return None
        return whole

    def _by_steps(self, name: str, axis: int) -> np.ndarray:
        parts = []
        for start in range(0, self.capacity, self.tokens):
            rows = np.minimum(start + np.arange(self.tokens), self.capacity - 1)
            parts.append(np.moveaxis(self.at(name, rows), axis, 0)[: self.capacity - start])
        return np.concatenate(parts)


class _Leaves(dict):
    """Values of a run, with the leaves made on demand."""

    def __init__(self, graph: Graph, positions: np.ndarray) -> None:
        super().__init__()
        self._graph = graph
        self._positions = positions

    def __missing__(self, name: str) -> np.ndarray:
        node = self._graph[name]
        return self._positions if node.op == "position" else self._graph.tables[node.attrs["key"]]
