"""The op table: every op of every level is one row. Adding an op touches one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kogc.ir.types import TensorType

#: ``shape(operand types, attrs) -> result type``; raises ValueError when the operands do not fit.
ShapeRule = Callable[[tuple[TensorType, ...], Mapping[str, Any]], TensorType]
#: ``evaluate(operand arrays, attrs) -> result array``, in whatever float width the operands have.
Evaluate = Callable[[tuple[np.ndarray, ...], Mapping[str, Any]], np.ndarray]


@dataclass(frozen=True)
class OpRow:
    """What the compiler knows of one op.

    ``role`` tells the fuser how the op may be placed: ``leaf``, ``core`` (begins a stage: linear, attention, embed,
    sample), ``rowwise`` (element i of the result needs element i of the operands: fits an epilogue), ``whole`` (needs
    whole vectors: fits only a prologue), ``state`` (writes a cache). Tensor-level ops have role ``tensor``.
    """

    name: str
    operands: tuple[str, ...]
    attrs: Mapping[str, str]
    shape: ShapeRule
    evaluate: Evaluate
    role: str
    doc: str
    flops: Callable[[tuple[TensorType, ...], Mapping[str, Any]], int] = lambda types, attrs: 0
    optional: int = 0  # how many trailing operands may be absent


_ROWS: dict[str, OpRow] = {}


def register(row: OpRow) -> OpRow:
    if row.name in _ROWS:
        raise ValueError(f"op {row.name} is registered twice")
    _ROWS[row.name] = row
    return row


def op_row(name: str) -> OpRow:
    """The row of ``name``. Raises KeyError for an op no level knows."""
    _load()
    return _ROWS[name]


def has_op(name: str) -> bool:
    _load()
    return name in _ROWS


def all_rows() -> tuple[OpRow, ...]:
    _load()
    return tuple(_ROWS.values())


def _load() -> None:
    # The tables import this module for ``register``; importing them lazily keeps the import graph without circles.
    from kogc.ir.ops import decode, leaves, stage, tensor  # noqa: F401
