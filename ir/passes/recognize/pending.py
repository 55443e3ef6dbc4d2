"""Pending values as functions: from the features of one base and from position functions to the value, by evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kogc.ir.graph import Node
from kogc.ir.passes.recognize.context import Context
from kogc.ir.passes.recognize.evaluate import double, frozen, needed, run
from kogc.ir.passes.recognize.values import Act, Pending, Space, Static


class Function:
    """``value(base, coefficients)`` of a pending value.

    ``entries`` are the activations it reads (views of the base), ``coefficients`` the position functions: both are names of
    tensor nodes. ``key`` is equal for functions that compute the same in the same way.
    """

    def __init__(self, context: Context, pending: Pending) -> None:
        self.name = pending.name
        self._context = context
        self.nodes = needed(context.graph, [pending.name], lambda name: not isinstance(context.values.get(name), Pending | None))
        inside = {node.name for node in self.nodes}
        bound = dict.fromkeys(name for node in self.nodes for name in node.inputs if name not in inside)
        self.entries: dict[str, Act] = {n: v for n in bound if isinstance(v := context.values[n], Act)}
        self.coefficients = [name for name in bound if isinstance(context.values[name], Static)]
        self.space: Space = next(iter(self.entries.values())).space
        self._views = {name: act.layout.indices() for name, act in self.entries.items()}
        self.key = self._key()

    def _key(self) -> object:
        place: dict[str, object] = {name: (act.layout, act.space) for name, act in self.entries.items()}
        place |= {name: self._context.functions.key(name) for name in self.coefficients}
        order: dict[str, int] = {}
        steps = []
        for node in self.nodes:
            order[node.name] = len(order)
            steps.append((node.op, frozen(node.attrs), tuple(order.get(name, place.get(name)) for name in node.inputs)))
        return tuple(steps)

    def coefficients_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """The position functions' values, in fp64."""
        return {name: double(self._context.functions.at(name, positions)) for name in self.coefficients}

    def __call__(self, base: np.ndarray, coefficients: Mapping[str, np.ndarray]) -> np.ndarray:
        """The value for a base, fp64 of the base's space."""
        flat = base.reshape(-1)
        values = {name: flat[view] for name, view in self._views.items()} | dict(coefficients)
        return np.asarray(run(self.nodes, values, rounded=False)[self.name])

    @property
    def origin(self) -> Node:
        return self._context.graph[self.name]
