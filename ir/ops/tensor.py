"""Tensor-level ops: the ATen ops of decoder code, as the frontend records them.

A node's attrs are ``args`` and ``kwargs`` of the ATen call, ``Ref(i)`` in place of operand i. A row is a numpy function
with ATen's parameter names and meaning. Values are computed in the width of the operands; the recorded type of the node
says what the result is rounded to, so ops that only cast return their operand. Shapes are recorded, not derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kogc.ir.graph import Ref
from kogc.ir.ops import OpRow, register
from kogc.ir.ops.tensor_math import MATH
from kogc.ir.ops.tensor_movement import MOVEMENT

ATTRS = {"args": "tuple", "kwargs": "dict"}


def substitute(value: Any, operands: tuple) -> Any:
    """``value`` with every ``Ref(i)`` inside replaced by ``operands[i]``."""
    if isinstance(value, Ref):
        return operands[value.index]
    if isinstance(value, tuple | list):
        return tuple(substitute(item, operands) for item in value)
    return value


def _evaluator(function: Callable) -> Callable[[tuple, Mapping[str, Any]], Any]:
    def evaluate(operands: tuple, attrs: Mapping[str, Any]) -> Any:
        args = substitute(attrs["args"], operands)
        kwargs = {name: substitute(value, operands) for name, value in attrs["kwargs"].items()}
        result = function(*args, **kwargs)
        return result if isinstance(result, tuple) else np.asarray(result)

    return evaluate


def _recorded(types: tuple, attrs: Mapping[str, Any]) -> None:
    """The frontend recorded the result's type; there is no second opinion."""


for _name, _function in {**MOVEMENT, **MATH}.items():
    register(OpRow(_name, (), ATTRS, _recorded, _evaluator(_function), "tensor", f"PyTorch's {_name}."))
