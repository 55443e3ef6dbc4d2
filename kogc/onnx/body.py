"""A list of ONNX nodes while it is written: the model's graph, or the body of one of its functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Body:
    """Nodes in order. Values are names; ``prefix`` keeps the names of several bodies apart."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._count = 0

    def op(self, kind: str, *inputs: str, domain: str = "", output: str | None = None, **attributes: Any) -> str:
        """The one result of a new node."""
        name = output or self._fresh(kind.lower())
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def const(self, value: Any, dtype: type = np.int64) -> str:
        """A constant: a number, or a list of them."""
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def number(self, value: float) -> str:
        return self.const(value, np.float32)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """``x`` in another shape; 0 keeps a dimension, −1 is found out."""
        return self.op("Reshape", x, self.const(list(shape)))

    def slice(self, x: str, axis: int, first: int, last: int) -> str:
        return self.op("Slice", x, self.const([first]), self.const([last]), self.const([axis]))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.const(list(axes)))

    def mean(self, x: str) -> str:
        """The mean over the last axis, which stays with length 1."""
        return self.op("ReduceMean", x, self.const([-1]), keepdims=1)

    def floats(self, x: str) -> str:
        return self.op("Cast", x, to=TensorProto.FLOAT)

    def _fresh(self, wish: str) -> str:
        self._count += 1
        return f"{self._prefix}{wish}_{self._count}"
