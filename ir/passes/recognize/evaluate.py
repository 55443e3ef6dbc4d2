"""Evaluating parts of a tensor graph with numpy, many times over: a plan is made once and run often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kogc.ir.graph import Graph, Node
from kogc.ir.ops import op_row
from kogc.ir.types import NUMPY_DTYPES

_HALF = (NUMPY_DTYPES["fp16"], NUMPY_DTYPES["bf16"])


def needed(graph: Graph, wanted: Iterable[str], bound: Callable[[str], bool]) -> list[Node]:
    """The nodes to evaluate for ``wanted`` when all ``bound`` nodes have values, operands first."""
    order: list[Node] = []
    seen: set[str] = set()
    waiting = [(name, False) for name in wanted]
    while waiting:
        name, ready = waiting.pop()
        if ready:
            order.append(graph[name])
        elif name not in seen and not bound(name):
            seen.add(name)
            waiting.append((name, True))
            waiting.extend((operand, False) for operand in graph[name].inputs)
    return order


def run(nodes: list[Node], values: dict[str, Any], rounded: bool) -> dict[str, Any]:
    """Evaluate ``nodes`` in their order, adding to ``values``.

    ``rounded`` rounds every result to its recorded dtype (as the model computes position functions); otherwise results
    keep the width of the operands and casts do nothing.
    """
    with np.errstate(all="ignore"):
        for node in nodes:
            operands = tuple(_wide(values[name]) for name in node.inputs)
            value = op_row(node.op).evaluate(operands, node.attrs)
            values[node.name] = _cast(value, node) if rounded and not isinstance(value, tuple) else value
    return values


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return value.astype(np.float32) if value.dtype in _HALF else value


def _cast(value: Any, node: Node) -> np.ndarray:
    value = np.asarray(value)
    dtype = node.type.numpy_dtype
    if np.iscomplexobj(value) and dtype.kind != "c":
        value = value.real
    return value.astype(dtype, copy=False)


def double(value: np.ndarray) -> np.ndarray:
    """``value`` in fp64 or complex128 when it is a float of any kind."""
    value = _wide(np.asarray(value))
    if value.dtype.kind == "f":
        return value.astype(np.float64)
    return value.astype(np.complex128) if value.dtype.kind == "c" else value


def frozen(value: Any) -> Any:
    """``value`` as something hashable."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    return (type(value).__name__, value) if isinstance(value, bool | int | float) else value
