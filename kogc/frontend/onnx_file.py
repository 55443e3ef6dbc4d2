"""What an ONNX file holds: its nodes, and its tensors without copying them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import inliner, numpy_helper

from kogc.frontend.errors import FrontendError, first_line

_EXTERNAL = {1: np.dtype(np.float32), 7: np.dtype(np.int64), 10: np.dtype(np.float16), 11: np.dtype(np.float64), 16: np.dtype(ml_dtypes.bfloat16)}
#: Operations that hand a tensor on as it is, or in another shape.
_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Slice")


class OnnxFile:
    """``files`` that it is read from, ``nodes`` in order with functions inlined, graph ``inputs`` and ``outputs``, and ``tensors`` by
    name as arrays (external ones are mapped). ``weights`` names the tensors that meet what the tokens make; others depend on nothing or go with the position.

    Raises FrontendError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = {path}
        try:
            model = onnx.load(path, load_external_data=False)
            onnx.checker.check_model(str(path))  # by its name: what lies beside it is looked at, too
        except Exception as error:  # protobuf's and onnx's own errors
            raise FrontendError(f"{path} is no valid ONNX file: {first_line(error)}") from error
        graph = inliner.inline_local_functions(model).graph
        self.nodes = list(graph.node)
        self.tensors = {tensor.name: self._tensor(tensor) for tensor in graph.initializer}
        self.inputs = [one for one in graph.input if one.name not in self.tensors]
        self.outputs = [one.name for one in graph.output]
        self._take_constants()

    def _tensor(self, tensor: onnx.TensorProto) -> np.ndarray:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            try:
                return numpy_helper.to_array(tensor)
            except (ValueError, KeyError, TypeError) as error:  # onnx has no check of its own for these
                raise FrontendError(f"{self.path}: tensor {tensor.name} is damaged: {first_line(error)}") from error
        facts = {entry.key: entry.value for entry in tensor.external_data}
        data = self.path.parent / facts["location"]
        self.files.add(data)
        if tensor.data_type not in _EXTERNAL or data.resolve().parent != self.path.parent.resolve():
            raise FrontendError(f"{self.path}: tensor {tensor.name} lies in {facts['location']}, which is not read (another folder, or another type)")
        try:
            return np.memmap(data, _EXTERNAL[tensor.data_type], "r", int(facts.get("offset", 0)), tuple(tensor.dims))
        except (OSError, ValueError, OverflowError) as error:
            raise FrontendError(f"{self.path}: tensor {tensor.name} cannot be read from {data}: {first_line(error)}") from error

    def _take_constants(self) -> None:
        kept = []
        for node in self.nodes:
            value = next((entry for entry in node.attribute if node.op_type == "Constant"), None)
            if value is None:
                kept.append(node)
            elif value.name == "value":
                self.tensors[node.output[0]] = numpy_helper.to_array(value.t)
            elif value.name in ("value_int", "value_float", "value_ints", "value_floats"):
                number = onnx.helper.get_attribute_value(value)
                self.tensors[node.output[0]] = np.asarray(number, np.int64 if "int" in value.name else np.float32)
            else:
                raise FrontendError(f"{self.path}: constant {node.output[0]} is a {value.name}, which is not supported")
        self.nodes = kept

    def weights(self, token: str, caches: Iterable[str]) -> list[str]:
        """Float tensors of more than one element that are combined with what is computed from ``token`` or ``caches``."""
        computed = {token, *caches}
        for node in self.nodes:
            if computed & set(node.input) and node.op_type != "Shape":  # a length says nothing of what the tokens make
                computed.update(node.output)
        used: set[str] = set()
        shown: dict[str, str] = {name: name for name in self.tensors}  # what is seen of which tensor
        for node in self.nodes:
            if computed & set(node.input):
                used |= {shown[name] for name in node.input if name in shown}
            elif node.op_type in _VIEWS and node.input[0] in shown:
                shown[node.output[0]] = shown[node.input[0]]
        return [name for name, value in self.tensors.items() if name in used and value.size > 1 and value.dtype.name in ("float32", "float16", "float64", "bfloat16")]
