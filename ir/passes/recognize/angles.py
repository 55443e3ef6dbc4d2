"""The cos and sin tables behind a probed rotation, for all positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.errors import NotUnderstood
from kogc.ir.passes.recognize.evaluate import double


class Angles:
    """A hypothesis: the probed value turns the features ``pairs`` [n, 2] of every head of ``head_dim``."""

    def __init__(self, context: Context, probe: Any, head_dim: int, pairs: np.ndarray) -> None:
        self._context = context
        self._probe = probe
        self._head_dim = head_dim
        self._pairs = pairs
        late = context.capacity - 1 - np.arange(probe.space.tokens) % context.capacity
        self._at = probe.function.coefficients_at(late)
        for name in probe.function.coefficients:
            if context.functions.depends_on_position(name) and context.functions.token_axis(name) is None:
                raise NotUnderstood("the angles of a rotary embedding depend on all positions of a step together")

    def explain(self, tolerance: float) -> bool:
        """Whether the hypothesis gives what the probe gives, on random features at late positions."""
        cos, sin = self._read(self._at)
        features = np.random.default_rng(1).standard_normal((self._probe.space.tokens, self._probe.space.row))
        heads = features.reshape(len(features), -1, self._head_dim)
        one, two = heads[..., self._pairs[:, 0]], heads[..., self._pairs[:, 1]]
        expected = heads.copy()
        expected[..., self._pairs[:, 0]] = one * cos[:, None] - two * sin[:, None]
        expected[..., self._pairs[:, 1]] = two * cos[:, None] + one * sin[:, None]
        return bool(np.abs(self._probe(features, self._at).reshape(heads.shape) - expected).max() <= tolerance * np.abs(features).max())

    def _read(self, coefficients: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [T, n] of the first head: what the first feature of each pair becomes when it alone is 1."""
        space = self._probe.space
        features = np.zeros((space.tokens, space.row // self._head_dim, self._head_dim))
        features[..., self._pairs[:, 0]] = 1
        turned = self._probe(features, coefficients).reshape(features.shape)
        return turned[:, 0, self._pairs[:, 0]], turned[:, 0, self._pairs[:, 1]]

    def tables(self) -> tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]:
        """("cos", [capacity, n]) and ("sin", …), fp64 when the model computes its angles so and else fp32."""
        found = self._looked_up()
        cos, sin = self._by_steps() if found is None else found
        graph = self._probe.function
        double_width = any(self._context.graph[name].type.dtype in ("fp64", "complex128") for name in graph.coefficients)
        dtype = np.float64 if double_width else np.float32
        return ("cos", np.ascontiguousarray(cos, dtype)), ("sin", np.ascontiguousarray(sin, dtype))

    def _looked_up(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Each coefficient is usually ± one element of one position function: find which, then tabulate the function.

        The functions are replaced by random numbers, so that an element is recognised by its value.
        """
        names = self._probe.function.coefficients
        moving = [name for name in names if self._context.functions.depends_on_position(name)]
        tables = {name: self._context.functions.tabulate(name) for name in moving}
        rng = np.random.default_rng(2)
        drawn = {name: self._at[name] for name in names}
        elements: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        for name in moving:
            shape = self._at[name].shape
            random = rng.uniform(1, 2, shape) + (1j * rng.uniform(1, 2, shape) if np.iscomplexobj(self._at[name]) else 0)
            drawn[name] = random
            first = np.moveaxis(random, self._context.functions.token_axis(name), 0)[0].reshape(-1)
            table = double(tables[name]).reshape(self._context.capacity, -1)
            for part in (np.real, np.imag) if np.iscomplexobj(random) else (np.asarray,):
                elements.append(part(first))
                columns.append(part(table))
        if not elements:
            return None
        elements, columns = np.concatenate(elements), np.concatenate(columns, 1)
        cos, sin = self._read(drawn)
        picked = [_picked(row, elements, columns) for row in (cos[0], sin[0])]
        if any(table is None for table in picked) or not self._agrees(picked):
            return None
        return picked[0], picked[1]

    def _agrees(self, tables: list[np.ndarray]) -> bool:
        late = self._context.capacity - 1 - np.arange(self._probe.space.tokens) % self._context.capacity
        return all(np.allclose(table[late], read, rtol=0, atol=1e-12) for table, read in zip(tables, self._read(self._at), strict=True))

    def _by_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the angles position by position, a step at a time."""
        capacity, tokens = self._context.capacity, self._probe.space.tokens
        parts = []
        for start in range(0, capacity, tokens):
            positions = np.minimum(start + np.arange(tokens), capacity - 1)
            parts.append(self._read(self._probe.function.coefficients_at(positions)))
        cos, sin = (np.concatenate(column)[:capacity] for column in zip(*parts, strict=True))
        return cos, sin


def _picked(row: np.ndarray, elements: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """For every number of ``row`` the column whose element it is, with its sign. None when one is no element."""
    order = np.argsort(elements)
    place = np.clip(np.searchsorted(elements[order], np.abs(row) - 1e-12), 0, len(elements) - 1)
    found = order[place]
    if not np.allclose(elements[found], np.abs(row), rtol=0, atol=1e-11):
        return None
    return columns[:, found] * np.sign(row)
