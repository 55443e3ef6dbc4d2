"""The tensors of an ONNX model, large ones in a file beside it, written one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

#: Tensors of fewer bytes stay in the model itself.
INSIDE_BYTES = 1 << 14
#: Tensors in the file begin at multiples of this, so that they can be mapped.
_ALIGN = 4096
_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


class TensorStore:
    """Collects ``tensors``, large ones in a file at ``path``, which the model calls ``name``. No tensor is held longer than it
    takes to write it."""

    def __init__(self, path: Path, name: str) -> None:
        self.tensors: list[onnx.TensorProto] = []
        self._path, self._name = path, name
        self._file: BinaryIO | None = None
        self._fp32: set[str] = set()

    def add(self, name: str, value: np.ndarray) -> str:
        """``name``, which stands for ``value`` in the model; fp64 becomes fp32."""
        value = np.ascontiguousarray(value.astype(np.float32) if value.dtype == np.float64 else value)
        kind = _TYPES[value.dtype.name]
        if kind == TensorProto.FLOAT:
            self._fp32.add(name)
        if value.nbytes < INSIDE_BYTES:
            self.tensors.append(helper.make_tensor(name, kind, value.shape, value.tobytes(), raw=True))
        else:
            self.tensors.append(self._outside(name, kind, value))
        return name

    def is_fp32(self, name: str) -> bool:
        return name in self._fp32

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _outside(self, name: str, kind: int, value: np.ndarray) -> onnx.TensorProto:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(bytes(-self._file.tell() % _ALIGN))
        tensor = TensorProto(name=name, data_type=kind, dims=value.shape, data_location=TensorProto.EXTERNAL)
        for key, text in (("location", self._name), ("offset", str(self._file.tell())), ("length", str(value.nbytes))):
            tensor.external_data.add(key=key, value=text)
        self._file.write(value.reshape(-1).view(np.uint8))  # and not `tofile`, which does not say why a disk takes no more
        return tensor
